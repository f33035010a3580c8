"""Which of two announcements stands, and that a flood of them ends somewhere."""

from collections.abc import Iterable

import pytest
from announcements import NOW, identity_of, make_announcement
from swarm_values import number_peer

from shoal.protocol.errors import RemoteProtocolError
from shoal.protocol.records.announcement_book import HINT_SECONDS, AnnouncementBook
from shoal.protocol.records.announcements import Announcement, PeerState


def remember(book: AnnouncementBook, peer: Announcement, now: float = NOW) -> None:
    """Add an announcement to a scope, with some bytes of its own as its value."""
    book.add("scope", peer, repr(peer).encode(), now)


def test_newer_replaces_older_and_never_the_other_way() -> None:
    book = AnnouncementBook()
    old = make_announcement(sequence=1)
    new = make_announcement(sequence=2, expires_at=NOW + 91)

    for peer in (old, new, new):
        remember(book, peer)
    with pytest.raises(RemoteProtocolError, match="newer"):
        remember(book, old)

    assert [a.sequence for a in book.list_current("scope", NOW)] == [2]
    assert len(book) == 1


@pytest.mark.parametrize(("sequence", "lifetime_seconds"), [(1, 95), (3, 89), (2, 90)])
def test_sequence_and_expiry_must_both_grow(sequence: int, lifetime_seconds: float) -> None:
    book = AnnouncementBook()
    remember(book, make_announcement(sequence=2))
    other = make_announcement(sequence=sequence, expires_at=NOW + lifetime_seconds, queue_seconds=1)

    with pytest.raises(RemoteProtocolError, match="newer"):
        remember(book, other)


def test_expired_announcement_no_longer_stands_in_the_way() -> None:
    book = AnnouncementBook()
    remember(book, make_announcement(sequence=9))
    restarted = make_announcement(sequence=1, issued_at=NOW + 90, expires_at=NOW + 180)

    remember(book, restarted, NOW + 90)

    assert [a.sequence for a in book.list_current("scope", NOW + 90)] == [1]
    assert book.list_current("scope", NOW + 180) == []


def test_expired_announcement_is_a_hint_for_a_day() -> None:
    book = AnnouncementBook()
    older, newer = (make_announcement(number, expires_at=NOW + 80 + number) for number in (1, 2))
    remember(book, older)
    remember(book, newer)

    assert book.list_hints("scope", NOW + 80) == []
    assert book.list_hints("scope", NOW + 90) == [newer, older]
    assert book.list_current("scope", NOW + 90) == book.list_records("scope", NOW + 90) == []
    assert book.list_hints("scope", newer.expires_at + HINT_SECONDS - 1) == [newer]
    assert book.list_hints("scope", newer.expires_at + HINT_SECONDS) == []
    assert len(book) == 0


def test_goodbye_leaves_no_hint() -> None:
    book = AnnouncementBook()
    remember(book, make_announcement(state=PeerState.OFFLINE))

    assert book.list_hints("scope", NOW + 90) == []
    assert len(book) == 0


def test_hint_gives_way_before_an_announcement_that_holds() -> None:
    book = AnnouncementBook(max_per_scope=3)
    for number in (1, 2, 3):
        expires_at = NOW + (10 if number == 2 else 90)
        remember(book, make_announcement(number, expires_at=expires_at))

    remember(book, make_announcement(4), NOW + 20)

    current = {peer.peer_id for peer in book.list_current("scope", NOW + 20)}
    assert current == {identity_of(number).peer_id for number in (1, 3, 4)}
    assert book.list_hints("scope", NOW + 20) == []


def test_record_is_listed_as_it_travels() -> None:
    book = AnnouncementBook()
    peer = make_announcement()
    book.add("scope", peer, b"sealed", NOW)

    assert [known.value for known in book.list_records("scope", NOW)] == [b"sealed"]
    assert book.find(b"sealed") == peer


def test_scopes_do_not_mix() -> None:
    book = AnnouncementBook()
    remember(book, make_announcement())

    assert book.list_current("two", NOW) == []


# ---- too many


class Crowd:
    """Peers that come to one book, each with records that grow newer."""

    def __init__(self, max_per_scope: int = 100, max_shared: int = 100) -> None:
        self.book = AnnouncementBook(max_per_scope, max_shared)
        self.now = NOW

    def announce(self, number: int) -> Announcement:
        return make_announcement(1, self.now, sequence=int(self.now), peer_id=number_peer(number))

    def come(self, scope: str, numbers: Iterable[int]) -> None:
        """Let peers announce themselves in a scope, in this order."""
        for number in numbers:
            value = f"{scope} {number} {self.now}".encode()
            self.book.add(scope, self.announce(number), value, self.now)

    def find(self, scope: str, numbers: Iterable[int]) -> list[int]:
        """Return which of the peers the book knows in a scope."""
        known = {a.peer_id for a in self.book.list_current(scope, self.now)}
        return [n for n in numbers if number_peer(n) in known]


def test_half_that_came_first_stays_and_the_next_one_gives_way() -> None:
    crowd = Crowd(max_per_scope=10)
    crowd.come("scope", range(1, 11))

    crowd.come("scope", range(20, 27))

    assert crowd.find("scope", range(1, 30)) == [*range(1, 6), *range(22, 27)]
    assert len(crowd.book) == 10


def test_hundredth_of_a_large_scope_gives_way_at_once() -> None:
    crowd = Crowd(max_per_scope=300, max_shared=300)
    crowd.come("scope", range(1, 301))

    crowd.come("scope", [400])
    assert crowd.find("scope", range(1, 401)) == [*range(1, 151), *range(154, 301), 400]

    crowd.come("scope", [401, 402])
    assert len(crowd.book) == 300
    crowd.come("scope", [403])
    assert crowd.find("scope", range(1, 401)) == [*range(1, 151), *range(157, 301), 400]


def test_renewal_keeps_a_place_and_expired_announcements_give_way_first() -> None:
    crowd = Crowd(max_per_scope=10)
    crowd.come("scope", range(1, 11))
    crowd.now += 60
    crowd.come("scope", [1, 2, 3, 6, 7])
    crowd.now += 30

    crowd.come("scope", range(20, 28))

    assert crowd.find("scope", range(1, 30)) == [1, 2, 3, 6, 7, *range(23, 28)]


def test_flood_that_is_over_leaves_nothing_behind() -> None:
    crowd = Crowd(max_per_scope=10, max_shared=10)
    for number in range(100):
        crowd.come(f"scope {number}", [number + 1])
        crowd.now += 10

    assert 0 < len(crowd.book) <= 10
    assert len(crowd.book._scopes) == len(crowd.book._by_value) == len(crowd.book)


def test_what_has_expired_and_nobody_here_uses_goes_with_the_next_that_comes() -> None:
    crowd = Crowd(max_per_scope=10, max_shared=100)
    crowd.book.reserve("ours")
    for scope in ("ours", "theirs"):
        crowd.come(scope, range(1, 6))

    crowd.now += 1000
    crowd.come("another", [7])

    assert [crowd.book.count(scope) for scope in ("ours", "theirs", "another")] == [5, 0, 1]


def test_flood_of_other_scopes_displaces_nobody_who_renews_in_time() -> None:
    crowd = Crowd(max_per_scope=50, max_shared=100)
    crowd.come("early", range(1, 21))

    for turn in range(5):
        crowd.come(f"flood {turn}", range(100 * turn, 100 * turn + 70))
        assert crowd.find("early", range(1, 21)) == list(range(1, 21))
        crowd.now += 30
        crowd.come("early", range(1, 21))

    assert len(crowd.book) <= 100


def test_reserved_scope_has_its_room_whatever_happens_in_others() -> None:
    crowd = Crowd(max_per_scope=30, max_shared=20)
    crowd.come("ours", range(1, 11))
    crowd.book.reserve("ours")
    for number in range(100):
        crowd.come(f"scope {number}", [1000 + number])
    crowd.come("ours", range(11, 31))

    crowd.come("flood", range(2000, 2050))

    assert crowd.find("ours", range(1, 31)) == list(range(1, 31))
    assert len(crowd.book) == 50


def test_reserved_scope_takes_no_room_from_others() -> None:
    crowd = Crowd(max_per_scope=30, max_shared=20)
    crowd.book.reserve("ours")
    crowd.come("ours", range(1, 31))

    crowd.come("others", range(100, 120))

    assert crowd.find("ours", range(1, 31)) == list(range(1, 31))
    assert crowd.find("others", range(100, 120)) == list(range(100, 120))


def test_own_announcement_never_gives_way() -> None:
    crowd = Crowd(max_per_scope=10, max_shared=10)
    crowd.come("scope", [500, *range(1, 60)])

    crowd.book.add_own("scope", crowd.announce(500), b"own", NOW)
    crowd.come("scope", range(100, 160))

    assert crowd.find("scope", [500]) == [500]
    assert crowd.find("scope", range(100, 160)) == list(range(155, 160))
