"""Which of the announcements that one process knows it tells another one."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection, Iterable, Sequence

from ..ids import PeerId
from ..messages.records import DIGEST_BYTES
from .announcements import KnownRecord, PeerState


def digest_record(value: bytes) -> bytes:
    """Return the short name of a record."""
    return hashlib.sha256(value).digest()[:DIGEST_BYTES]


def join_digests(records: Iterable[KnownRecord]) -> bytes:
    """Return the names of records, as a question has them."""
    return b"".join(digest_record(known.value) for known in records)


def split_digests(joined: bytes) -> frozenset[bytes]:
    """Return the names in a question."""
    starts = range(0, len(joined), DIGEST_BYTES)
    return frozenset(joined[start : start + DIGEST_BYTES] for start in starts)


def choose_records(
    records: Collection[KnownRecord],
    known: Collection[bytes],
    max_bytes: int,
    rng: random.Random,
    own_id: PeerId,
) -> tuple[bytes, ...]:
    """Return the values to tell somebody who has the `known` ones, as many as `max_bytes` hold.

    Our own comes first, also if it is known: it shows that we live. The others are drawn anew each
    time; those that add a block which nobody before them serves come before the rest.
    """
    own = [one for one in records if one.announcement.peer_id == own_id]
    num_blocks = own[0].announcement.num_blocks if own else 0
    new = [
        one
        for one in records
        if one.announcement.peer_id != own_id and digest_record(one.value) not in known
    ]
    chosen: list[bytes] = []
    num_bytes = 0
    for record in (*own, *_order_by_cover(rng.sample(new, len(new)), num_blocks)):
        num_bytes += len(record.value)
        if num_bytes > max_bytes:
            break
        chosen.append(record.value)
    return tuple(chosen)


def _order_by_cover(records: Sequence[KnownRecord], num_blocks: int) -> list[KnownRecord]:
    """Return records, those first that add to the blocks which the ones before them serve."""
    missing = set(range(num_blocks))
    adding: list[KnownRecord] = []
    rest: list[KnownRecord] = []
    for record in records:
        peer = record.announcement
        added: set[int] = set()
        # How many blocks there are is for us to say: strangers say what they like.
        if missing and peer.state is PeerState.ONLINE and peer.num_blocks == num_blocks:
            added = missing.intersection(range(peer.span.start, peer.span.stop))
        missing.difference_update(added)
        (adding if added else rest).append(record)
    return adding + rest
