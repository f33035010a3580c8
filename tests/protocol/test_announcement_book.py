"""Which of two announcements stands, and that a flood of them ends somewhere."""

from collections.abc import Callable

import pytest

from shoal.protocol.announcement_book import AnnouncementBook
from shoal.protocol.announcements import Announcement, sign_announcement
from shoal.protocol.errors import RemoteProtocolError
from shoal.protocol.identity import Identity

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


def test_full_book_keeps_what_it_has_until_it_expires(
    announce: Announce, identity_of: IdentityOf, now: float
) -> None:
    book = AnnouncementBook(max_announcements=2)
    for number in (1, 2):
        record = sign_announcement(identity_of(number), announce(number))
        book.add(f"scope {number}", record, now)
    late = announce(3, issued_at=now + 1, expires_at=now + 91)
    renewed = announce(1, sequence=2, expires_at=now + 91)

    with pytest.raises(RemoteProtocolError, match="too many"):
        book.add("scope 3", sign_announcement(identity_of(3), late), now + 1)
    book.add("scope 1", sign_announcement(identity_of(1), renewed), now + 1)
    book.add("scope 3", sign_announcement(identity_of(3), late), now + 90)

    assert len(book) == 2
    assert [len(book.list_current(f"scope {n}", now + 90)) for n in (1, 2, 3)] == [1, 0, 1]
