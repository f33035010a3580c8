"""Which of two announcements stands, and that a flood of them ends somewhere."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache

import pytest

from shoal.protocol.errors import RemoteProtocolError
from shoal.protocol.identity import Identity
from shoal.protocol.records.announcement_book import AnnouncementBook
from shoal.protocol.records.announcements import Announcement, sign_announcement

Announce = Callable[..., Announcement]
IdentityOf = Callable[[int], Identity]


def test_newer_replaces_older_and_never_the_other_way(
    announce: Announce, identity_of: IdentityOf, now: float
) -> None:
    book, identity = AnnouncementBook(), identity_of(1)
    old = sign_announcement(identity, announce(sequence=1))
    new = sign_announcement(identity, announce(sequence=2, expires_at=now + 91))

    book.add("scope", old, now)
    book.add("scope", new, now)
    book.add("scope", new, now)
    with pytest.raises(RemoteProtocolError, match="newer"):
        book.add("scope", old, now)

    assert [a.sequence for a in book.list_current("scope", now)] == [2]
    assert len(book) == 1


@pytest.mark.parametrize(("sequence", "lifetime_seconds"), [(1, 95), (3, 89), (2, 90)])
def test_sequence_and_expiry_must_both_grow(
    announce: Announce, identity_of: IdentityOf, now: float, sequence: int, lifetime_seconds: float
) -> None:
    book, identity = AnnouncementBook(), identity_of(1)
    book.add("scope", sign_announcement(identity, announce(sequence=2)), now)
    other = announce(sequence=sequence, expires_at=now + lifetime_seconds, queue_seconds=1)

    with pytest.raises(RemoteProtocolError, match="newer"):
        book.add("scope", sign_announcement(identity, other), now)


def test_expired_announcement_no_longer_stands_in_the_way(
    announce: Announce, identity_of: IdentityOf, now: float
) -> None:
    book, identity = AnnouncementBook(), identity_of(1)
    book.add("scope", sign_announcement(identity, announce(sequence=9)), now)
    restarted = announce(sequence=1, issued_at=now + 90, expires_at=now + 180)

    book.add("scope", sign_announcement(identity, restarted), now + 90)

    assert [a.sequence for a in book.list_current("scope", now + 90)] == [1]
    assert book.list_current("scope", now + 180) == []
    assert len(book) == 0


def test_scopes_do_not_mix(announce: Announce, identity_of: IdentityOf, now: float) -> None:
    book = AnnouncementBook()
    book.add("one", sign_announcement(identity_of(1), announce()), now)

    assert book.list_current("two", now) == []


# ---- too many


SECRET = b"decides the lottery"


@cache
def make_identity(number: int) -> Identity:
    return Identity(number.to_bytes(32, "big"))


class Crowd:
    """Peers that come to one book, each with records that grow newer."""

    def __init__(
        self, announce: Announce, now: float, max_per_scope: int = 100, max_shared: int = 100
    ) -> None:
        self.book = AnnouncementBook(max_per_scope, max_shared, SECRET)
        self.now = now
        self._announce = announce

    def make_record(self, number: int) -> bytes:
        times = {"issued_at": self.now, "expires_at": self.now + 90}
        announcement = self._announce(sequence=int(self.now), **times)
        identity = make_identity(number)
        return sign_announcement(identity, replace(announcement, peer_id=identity.peer_id))

    def come(self, scope: str, numbers: Iterable[int]) -> list[int]:
        """Let peers announce themselves in a scope, in this order; return who is refused."""
        refused: list[int] = []
        for number in numbers:
            try:
                self.book.add(scope, self.make_record(number), self.now)
            except RemoteProtocolError:
                refused.append(number)
        return refused

    def find(self, scope: str, numbers: Iterable[int]) -> list[int]:
        """Return which of the peers the book knows in a scope."""
        known = {a.peer_id for a in self.book.list_current(scope, self.now)}
        return [n for n in numbers if make_identity(n).peer_id in known]


def test_who_came_long_ago_stays_in_a_full_scope_as_long_as_it_renews(
    announce: Announce, now: float
) -> None:
    crowd = Crowd(announce, now, max_per_scope=20)
    crowd.come("scope", range(1, 11))

    for turn in range(5):
        crowd.come("scope", range(100 * turn + 100, 100 * turn + 200))
        crowd.now += 30
        assert crowd.come("scope", range(1, 11)) == []

    assert crowd.find("scope", range(1, 11)) == list(range(1, 11))
    assert len(crowd.book) <= 20


def test_first_come_is_not_first_served_in_the_other_half_of_a_full_scope(
    announce: Announce, now: float
) -> None:
    early, late = range(100, 200), range(200, 300)
    kept: list[set[int]] = []
    for order in ([*early, *late], [*late, *early]):
        crowd = Crowd(announce, now, max_per_scope=40)
        crowd.come("scope", range(1, 21))
        crowd.come("scope", order)
        kept.append(set(crowd.find("scope", order)))

    assert kept[0] == kept[1]
    assert len(kept[0]) == 20
    assert len(kept[0].intersection(late)) >= 5


def test_coming_again_does_not_help(announce: Announce, now: float) -> None:
    crowd = Crowd(announce, now, max_per_scope=10)
    crowd.come("scope", range(1, 60))
    outside = sorted(set(range(1, 60)) - set(crowd.find("scope", range(1, 60))))

    for _ in range(3):
        crowd.now += 1
        assert crowd.come("scope", outside) == outside


def test_lottery_cannot_be_foreseen(announce: Announce, now: float) -> None:
    crowds = [Crowd(announce, now, max_per_scope=20) for _ in range(2)]
    crowds[1].book = AnnouncementBook(20, 100)

    for crowd in crowds:
        crowd.come("scope", range(1, 200))

    assert len({tuple(crowd.find("scope", range(11, 200))) for crowd in crowds}) == 2


def test_expired_announcements_make_room(announce: Announce, now: float) -> None:
    crowd = Crowd(announce, now, max_per_scope=10, max_shared=10)
    crowd.come("scope", range(1, 100))

    crowd.now += 90

    assert crowd.come("scope", range(200, 210)) == []
    assert crowd.find("scope", range(200, 210)) == list(range(200, 210))
    assert len(crowd.book) == 10


def test_lots_are_drawn_anew_when_some_have_expired(announce: Announce, now: float) -> None:
    crowd = Crowd(announce, now, max_per_scope=10)
    crowd.come("scope", range(1, 12))
    crowd.now += 60
    crowd.come("scope", range(1, 6))
    crowd.now += 60

    crowd.come("scope", range(100, 160))

    assert crowd.find("scope", range(1, 6)) == list(range(1, 6))
    assert len(crowd.find("scope", range(100, 160))) == 5


def test_flood_that_is_over_leaves_nothing_behind(announce: Announce, now: float) -> None:
    crowd = Crowd(announce, now, max_per_scope=10, max_shared=10)
    for number in range(100):
        crowd.come(f"scope {number}", [number + 1])
        crowd.now += 10

    assert len(crowd.book._scopes) <= 10
    assert crowd.book._verify.cache_info().currsize <= 20


def test_flood_in_one_scope_neither_blocks_nor_displaces_others(
    announce: Announce, now: float
) -> None:
    crowd = Crowd(announce, now)
    crowd.come("early", range(1, 21))

    crowd.come("flood", range(1000, 1200))
    refused = crowd.come("late", range(30, 50))
    crowd.come("flood", range(1200, 1400))

    assert refused == []
    assert crowd.find("early", range(1, 21)) == list(range(1, 21))
    assert crowd.find("late", range(30, 50)) == list(range(30, 50))
    assert len(crowd.book) == 100


def test_scopes_that_are_too_many_share_evenly(announce: Announce, now: float) -> None:
    crowd = Crowd(announce, now, max_shared=20)
    for number in range(10):
        crowd.come(f"scope {number}", range(100 * number, 100 * number + 20))

    sizes = [len(crowd.book.list_current(f"scope {number}", now)) for number in range(10)]

    assert sum(sizes) == 20
    assert max(sizes) - min(sizes) <= 2

    for number in range(10, 100):
        crowd.come(f"scope {number}", [number])
    assert len(crowd.book) == 20
    assert crowd.come("one more", [1]) == [1]


def test_reserved_scope_has_its_room_whatever_happens_in_others(
    announce: Announce, now: float
) -> None:
    crowd = Crowd(announce, now, max_per_scope=30, max_shared=20)
    crowd.come("ours", range(1, 11))
    crowd.book.reserve("ours")
    for number in range(100):
        crowd.come(f"scope {number}", [1000 + number])

    assert crowd.come("ours", range(11, 31)) == []

    crowd.come("flood", range(2000, 2050))
    assert crowd.find("ours", range(1, 31)) == list(range(1, 31))
    assert len(crowd.book) == 50


def test_reserved_scope_takes_no_room_from_others(announce: Announce, now: float) -> None:
    crowd = Crowd(announce, now, max_per_scope=30, max_shared=20)
    crowd.book.reserve("ours")
    crowd.come("ours", range(1, 31))

    assert crowd.come("others", range(100, 120)) == []
    assert len(crowd.book) == 50


def test_own_announcement_always_finds_room_and_keeps_it(announce: Announce, now: float) -> None:
    for own in range(500, 506):
        crowd = Crowd(announce, now, max_per_scope=10, max_shared=10)
        crowd.come("scope", range(1, 60))
        crowd.come("elsewhere", range(60, 100))

        crowd.book.add_own("scope", crowd.make_record(own), now)
        crowd.come("scope", range(100, 160))

        assert crowd.find("scope", [own]) == [own]
        assert crowd.find("scope", range(100, 160)), "others still take part in the lottery"


def test_own_announcement_keeps_its_place_though_it_was_known_as_a_strangers(
    announce: Announce, now: float
) -> None:
    """A restarted peer may read what it announced before."""
    for own in range(500, 506):
        kept: list[list[int]] = []
        for order in (range(100, 160), range(159, 99, -1)):
            crowd = Crowd(announce, now, max_per_scope=10)
            crowd.come("scope", [*range(1, 6), own, *range(6, 11)])
            crowd.book.add_own("scope", crowd.make_record(own), now)
            crowd.come("scope", order)
            kept.append(crowd.find("scope", range(100, 160)))
            assert crowd.find("scope", [own]) == [own]

        assert kept[0] == kept[1], "the others still draw lots"
