"""Gates of the DHT without a DHT: what its nodes hand over, with plain keys."""

from __future__ import annotations

from typing import Any

from announcements import NOW

from shoal.protocol.membership.membership import Membership
from shoal.protocol.net.dht.record_gate import RecordGate


class StoppedClock:
    """Shows one time until it is set."""

    def __init__(self, wall_seconds: float) -> None:
        self.wall_seconds = wall_seconds

    def now(self) -> float:
        return self.wall_seconds

    def wall(self) -> float:
        return self.wall_seconds


def make_gate(membership: Membership, **options: Any) -> RecordGate:
    return RecordGate(membership, StoppedClock(NOW), digest, pack, **options)


def digest(key: str) -> bytes:
    return b"digest of " + key.encode()


def pack(value: str | bytes) -> bytes:
    """MSGPack's form of byte strings; of text only that it is another one."""
    if isinstance(value, str):
        return b"text " + value.encode()
    if len(value) < 256:
        return b"\xc4" + len(value).to_bytes(1, "big") + value
    return b"\xc5" + len(value).to_bytes(2, "big") + value
