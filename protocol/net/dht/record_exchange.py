"""How a node of the DHT is asked for what stands under a key: it sends what the asker lacks.

hivemind sends everything, and each replica does so each time. Here the question says what is known
already, in a few bytes for each record; of a thousand records, mostly the renewed ones travel. What
is too much for one answer comes with the next: so a slow link gets on, and a liar cannot send more
at once than is soon checked.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from ...errors import RemoteProtocolError

QUESTION = "shoal.records.1"
"""The name of the libp2p protocol that carries a question there and an answer back."""

KEY_BYTES = 20
"""A key of the DHT, digested."""

MAX_KNOWN = 4096
"""How many records a question may name."""

MAX_ANSWER_BYTES = 128 * 2**10
"""It arrives within the 1.5 s that an answer may take where a link carries 0.7 Mbit/s."""

_DIGEST_BYTES = 8
_HEAD = struct.Struct("!BHd")  # lengths of sub-key and value, and the wall second of the expiry


@dataclass(frozen=True)
class Entry:
    """The record under a key and one of its sub-keys; the value as the DHT packs it."""

    subkey: str
    value: bytes
    expires_at: float

    @cached_property
    def digest(self) -> bytes:
        """A short name for exactly this entry."""
        return hashlib.sha256(self.encode()).digest()[:_DIGEST_BYTES]

    def encode(self) -> bytes:
        """Return the entry as it stands in an answer."""
        subkey = self.subkey.encode()
        return _HEAD.pack(len(subkey), len(self.value), self.expires_at) + subkey + self.value


def encode_question(key: bytes, known: Collection[bytes]) -> bytes:
    """Return the question for everything under a digested key but what is known, by digests."""
    return key + b"".join(known)


def decode_question(question: bytes) -> tuple[bytes, frozenset[bytes]]:
    """Return the key and the digests of a question; raises RemoteProtocolError."""
    key, digests = question[:KEY_BYTES], question[KEY_BYTES:]
    num_known, rest = divmod(len(digests), _DIGEST_BYTES)
    if len(key) < KEY_BYTES or rest or num_known > MAX_KNOWN:
        raise RemoteProtocolError("the question for records is malformed")
    starts = range(0, len(digests), _DIGEST_BYTES)
    return key, frozenset(digests[start : start + _DIGEST_BYTES] for start in starts)


def encode_answer(entries: Iterable[Entry], known: Collection[bytes]) -> bytes:
    """Return what the asker lacks, as far as one message holds it."""
    parts: list[bytes] = []
    num_bytes = 0
    for entry in entries:
        if entry.digest in known:
            continue
        part = entry.encode()
        num_bytes += len(part)
        if num_bytes > MAX_ANSWER_BYTES:
            break
        parts.append(part)
    return b"".join(parts)


def may_be_cut(answer: bytes) -> bool:
    """Return whether there may be more than one message held."""
    return len(answer) > MAX_ANSWER_BYTES // 2  # far more than any entry that gates let in


def decode_answer(answer: bytes) -> Sequence[Entry]:
    """Return the entries of an answer; raises RemoteProtocolError."""
    if len(answer) > MAX_ANSWER_BYTES:
        raise RemoteProtocolError("the answer with records is too large")
    entries: list[Entry] = []
    place = 0
    while place < len(answer):
        try:
            num_subkey, num_value, expires_at = _HEAD.unpack_from(answer, place)
            place += _HEAD.size
            subkey = answer[place : place + num_subkey].decode()
        except (struct.error, UnicodeDecodeError) as error:
            raise RemoteProtocolError(f"the answer with records is malformed: {error}") from error
        place += num_subkey + num_value
        if place > len(answer):
            raise RemoteProtocolError("the answer with records is cut short")
        if math.isfinite(expires_at):  # a bad one must not hide the others
            entries.append(Entry(subkey, answer[place - num_value : place], expires_at))
    return entries
