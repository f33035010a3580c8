"""A client's own mistakes are told to it, and no peer is blamed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from story_outputs import assert_same
from torch import Tensor

from shoal.protocol.errors import ErrorCode, RefusedError, UsageError
from shoal.protocol.messages.session import Declined, Output


def with_value(value: float) -> Tensor:
    hidden = torch.zeros(1, 2, 64)
    hidden[0, 1, 5] = value
    return hidden


MISTAKES: dict[str, tuple[Tensor, tuple[int, ...] | None]] = {
    "NaN": (with_value(math.nan), None),
    "infinity": (with_value(math.inf), None),
    "too wide": (torch.zeros(1, 1, 65), None),
    "too few dimensions": (torch.zeros(1, 64), None),
    "no tokens": (torch.zeros(1, 0, 64), None),
    "another number of rows": (torch.zeros(2, 1, 64), None),
    "whole numbers": (torch.zeros(1, 1, 64, dtype=torch.int64), None),
    "too long": (torch.zeros(1, 60, 64), None),
    "a row map of two": (torch.zeros(1, 1, 64), (0, 0)),
    "a row map beyond": (torch.zeros(1, 1, 64), (1,)),
}


@pytest.mark.parametrize(("hidden", "row_map"), MISTAKES.values(), ids=MISTAKES.keys())
def test_mistake_of_the_client_is_told_and_no_peer_is_blamed(
    run_story: Any, hidden: Tensor, row_map: tuple[int, ...] | None
) -> None:
    async def story(world: Any) -> None:
        session, turns = world.open(max_tokens=64), world.make_turns()
        outputs = await world.take_all(session, turns[:2])
        hosts = world.hosts_of(session)

        with pytest.raises(UsageError):
            await session.step(hidden, row_map)
        outputs += await world.take_all(session, turns[2:])

        assert_same(outputs, world.expect(turns))
        assert world.hosts_of(session) == hosts
        assert session.failovers == []
        assert world.quarantined_hosts == set()

    run_story(story)


def test_session_beyond_the_limit_of_the_model_is_refused_and_no_peer_is_blamed(
    run_story: Any,
) -> None:
    async def story(world: Any) -> None:
        session, turns = world.open(max_tokens=513), world.make_turns()

        with pytest.raises(RefusedError, match="limit is 512") as error:
            await world.take(session, turns[0])

        assert error.value.code is ErrorCode.TOO_LONG
        assert session.position == 0
        assert world.quarantined_hosts == set()

    run_story(story)


@pytest.mark.parametrize("delivery", ["star"], indirect=True)
def test_peer_that_blames_sound_values_is_replaced_and_avoided(run_story: Any) -> None:
    async def story(world: Any) -> None:
        session, turns = world.open(), world.make_turns()
        outputs = await world.take_all(session, turns[:2])

        world.liar.lie_once(
            Output,
            lambda output: Declined(
                output.session, output.sequence, ErrorCode.BAD_VALUES, "they make blocks overflow"
            ),
        )
        outputs += await world.take_all(session, turns[2:])

        assert_same(outputs, world.expect(turns))
        (failover,) = session.failovers
        assert "overflow" in failover.reason
        assert world.quarantined_hosts == {world.liar.host}

    run_story(story)


def test_closed_session_takes_no_step(run_story: Any) -> None:
    async def story(world: Any) -> None:
        session, turns = world.open(), world.make_turns()
        await world.take(session, turns[0])

        await session.close()
        await session.close()

        with pytest.raises(UsageError, match="closed"):
            await world.take(session, turns[1])

    run_story(story)
