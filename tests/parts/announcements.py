"""What a peer announces, where a test has little to say about it."""

from typing import Any

from shoal.protocol.endpoints import Endpoint
from shoal.protocol.identity import Identity
from shoal.protocol.ids import ModelId
from shoal.protocol.net.clock import Clock
from shoal.protocol.net.directory import Directory
from shoal.protocol.records.announcements import Announcement, PeerState, sign_announcement
from shoal.protocol.spans import Span

MODEL = ModelId("a" * 32)
NOW = 1_800_000_000.0


def identity_of(number: int) -> Identity:
    return Identity(bytes([number]) * 32)


def make_announcement(number: int = 1, now: float = NOW, **changes: Any) -> Announcement:
    """Return what peer `number` announces: ONLINE with blocks 0:4 of 8, for 90 s."""
    usual: dict[str, Any] = {
        "peer_id": identity_of(number).peer_id,
        "model_id": MODEL,
        "num_blocks": 8,
        "span": Span(0, 4),
        "endpoints": (Endpoint("127.0.0.1", 4000 + number, "c" * 64),),
        "max_version": 2,
        "compute_dtype": "bf16",
        "issued_at": now,
        "expires_at": now + 90,
    }
    return describe_peer(**(usual | changes))


def sign(announcement: Announcement, number: int = 1) -> bytes:
    return sign_announcement(identity_of(number), announcement)


def describe_peer(**facts: Any) -> Announcement:
    """Return the first announcement of a peer that is ONLINE, nowhere to be dialled, with changes.

    Who it is, which blocks of which model it serves, and from when to when, a test has to say.
    """
    usual: dict[str, Any] = {
        "state": PeerState.ONLINE,
        "endpoints": (),
        "min_version": 1,
        "max_version": 1,
        "weights": "int8",
        "compute_dtype": "fp32",
        "sequence": 1,
    }
    return Announcement(**(usual | facts))


async def announce_scripted(
    directory: Directory, clock: Clock, identity: Identity, endpoint: Endpoint, **facts: Any
) -> None:
    """Announce, once and for ten minutes, a peer that a test scripts."""
    now = clock.wall()
    usual: dict[str, Any] = {
        "peer_id": identity.peer_id,
        "model_id": MODEL,
        "num_blocks": 8,
        "span": Span(4, 8),
        "endpoints": (endpoint,),
        "sequence": int(1000 * now),
        "issued_at": now,
        "expires_at": now + 600,
    }
    await directory.announce(sign_announcement(identity, describe_peer(**(usual | facts))))
