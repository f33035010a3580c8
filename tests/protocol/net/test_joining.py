"""A peer that starts before its network, or before its swarm, waits for them."""

from __future__ import annotations

from typing import Any

import pytest
from virtual_time import VirtualClock, run_virtual

from shoal.protocol.errors import DirectoryError, NobodyAnswersError, WrongSwarmError
from shoal.protocol.identity import Identity
from shoal.protocol.net.network import join_patiently

IDENTITY = Identity(bytes(32))


class LateNetwork:
    """A network where some attempts to join fail before one succeeds."""

    def __init__(self, *errors: DirectoryError) -> None:
        self.errors = list(errors)

    async def serve(self, identity: Identity, serve: Any) -> Any:
        if self.errors:
            raise self.errors.pop(0)
        return identity


def join(network: Any) -> tuple[Any, list[str], float]:
    """Return what was joined, what was reported and how long it took."""
    clock, told = VirtualClock(), list[str]()

    async def run() -> Any:
        return await join_patiently(network, IDENTITY, None, clock, told.append), clock.now()  # pyright: ignore[reportArgumentType]

    joined, seconds = run_virtual(run())
    return joined, told, seconds


def test_peer_waits_for_somebody_to_answer_and_says_so_once() -> None:
    joined, told, seconds = join(LateNetwork(*[NobodyAnswersError("nobody is there")] * 10))

    assert joined is IDENTITY
    assert told == ["nobody is there"]
    assert 100 < seconds < 600


def test_swarm_that_answers_at_once_is_joined_without_a_word() -> None:
    assert join(LateNetwork())[:2] == (IDENTITY, [])


@pytest.mark.parametrize("error", [WrongSwarmError("another swarm"), DirectoryError("the clock")])
def test_what_does_not_pass_is_not_waited_for(error: DirectoryError) -> None:
    with pytest.raises(type(error)):
        join(LateNetwork(NobodyAnswersError("nobody is there"), error))
