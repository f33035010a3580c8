"""Announcements that are valid as they are, for tests that change one thing about them."""

from collections.abc import Callable
from typing import Any

import pytest

from shoal.protocol.endpoints import Endpoint
from shoal.protocol.identity import Identity
from shoal.protocol.ids import ModelId
from shoal.protocol.records.announcements import Announcement, PeerState
from shoal.protocol.spans import Span

NOW = 1_800_000_000.0


def make_identity(number: int) -> Identity:
    return Identity(bytes([number]) * 32)


def make_announcement(number: int = 1, **changes: Any) -> Announcement:
    """Return what peer `number` announces at NOW: ONLINE with blocks 0:4 of 8, for 90 s."""
    fields: dict[str, Any] = {
        "peer_id": make_identity(number).peer_id,
        "model_id": ModelId("a" * 32),
        "num_blocks": 8,
        "span": Span(0, 4),
        "state": PeerState.ONLINE,
        "endpoints": (Endpoint("127.0.0.1", 4000 + number, "c" * 64),),
        "min_version": 1,
        "max_version": 2,
        "weights": "int8",
        "compute_dtype": "bf16",
        "sequence": 1,
        "issued_at": NOW,
        "expires_at": NOW + 90,
    }
    return Announcement(**(fields | changes))


@pytest.fixture
def now() -> float:
    """The wall time at which the announcements were issued."""
    return NOW


@pytest.fixture
def identity_of() -> Callable[[int], Identity]:
    """Returns the identity of the peer with a number."""
    return make_identity


@pytest.fixture
def announce() -> Callable[..., Announcement]:
    """Returns `make_announcement`: what the peer with a number announces, with changes."""
    return make_announcement
