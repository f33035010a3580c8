"""Which of the announcements that one process knows it tells another one."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection, Iterable, Iterator
from itertools import chain, islice

from ..ids import PeerId
from ..messages.records import DIGEST_BYTES
from .announcements import KnownRecord

_NUM_REPLICAS = 2
"""Peers of each block that are told before all others."""

_NUM_COMPARED = 8
"""Peers of a block of which the one is told that adds most."""


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
    own_id: PeerId | None = None,
) -> tuple[bytes, ...]:
    """Return the values to tell somebody who has the `known` ones, as many as `max_bytes` hold.

    Our own comes first, also if it is known: it shows that we live. However few fit, they cover
    all blocks if they can, and are drawn anew each time.
    """
    own = [one for one in records if one.announcement.peer_id == own_id]
    others = [one for one in records if one.announcement.peer_id != own_id]
    new = [one for one in others if digest_record(one.value) not in known]
    chosen: list[bytes] = []
    num_bytes = 0
    for record in chain(own, _order_by_cover(new, rng)):
        num_bytes += len(record.value)
        if num_bytes > max_bytes:
            break
        chosen.append(record.value)
    return tuple(chosen)


def _order_by_cover(records: Collection[KnownRecord], rng: random.Random) -> Iterator[KnownRecord]:
    """Yield records: first some that cover all blocks, then some that do so again, then all."""
    waiting = rng.sample(list(records), len(records))
    depths = [0] * max((one.announcement.num_blocks for one in records), default=0)
    bare = set(range(len(depths)))  # nobody is left for the others
    while waiting and bare:
        block = min(bare, key=depths.__getitem__)
        if depths[block] >= _NUM_REPLICAS:
            break
        here = (index for index, one in enumerate(waiting) if block in one.announcement.span)
        candidates = list(islice(here, _NUM_COMPARED))
        if not candidates:
            bare.discard(block)
            continue

        def count_bare(index: int, depth: int = depths[block]) -> int:
            span = waiting[index].announcement.span
            return depths[span.start : span.stop].count(depth)

        record = waiting.pop(max(candidates, key=count_bare))
        span = record.announcement.span
        depths[span.start : span.stop] = (depth + 1 for depth in depths[span.start : span.stop])
        yield record
    yield from waiting
