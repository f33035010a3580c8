"""How clients and peers tell each other which announcements they know of one model."""

from __future__ import annotations

from typing import Annotated

from .. import limits
from .fields import Body, HeaderSession, Message, count_to, message

DIGEST_BYTES = 8
"""A record is named by so many bytes of its SHA-256."""

MAX_NAMED_RECORDS = 4096

MAX_RECORD_BYTES = 2 * limits.MAX_ANNOUNCEMENT_BYTES
"""One record with what belongs to it in a private swarm. The longest is a list of revocations."""

MAX_RECORDS_BYTES = 48 * 2**10
"""All records of an answer. 1,000 announcements of 400 bytes take nine answers."""


def _check_known(value: bytes) -> None:
    if len(value) % DIGEST_BYTES or len(value) > MAX_NAMED_RECORDS * DIGEST_BYTES:
        raise ValueError(f"{len(value)} bytes do not name records")


def _check_own(value: bytes) -> None:
    if len(value) > MAX_RECORD_BYTES:
        raise ValueError(f"a record of {len(value)} bytes is too large")


def _check_records(value: tuple[bytes, ...]) -> None:
    for record in value:
        _check_own(record)
    if b"" in value or sum(map(len, value)) > MAX_RECORDS_BYTES:
        raise ValueError("a record is empty, or there are too many in one message")


@message(32)
class RecordFetch(Message):
    """Ask a peer for announcements of its model that the asker lacks, once on a stream.

    The answer is `Records`, of `max_bytes` at most. `known` are digests of what the asker has;
    `own` is the record of the asker, or nothing if it is a client.
    """

    question: HeaderSession
    own: Annotated[bytes, Body(1, "bytes"), _check_own]
    known: Annotated[bytes, Body(2, "bytes"), _check_known]
    max_bytes: Annotated[int, Body(3, "uint32"), count_to(MAX_RECORDS_BYTES, "bytes of records")]


@message(33)
class Records(Message):
    """Announcements that the asker lacks, the peer's own one first; `has_own`: the peer keeps the
    asker's.
    """

    question: HeaderSession
    records: Annotated[tuple[bytes, ...], Body(1, "bytes"), _check_records]
    has_own: Annotated[bool, Body(2, "bool")] = False
