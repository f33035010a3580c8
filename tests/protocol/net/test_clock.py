"""Timeouts of answers."""

import asyncio

import pytest
from virtual_time import VirtualClock

from shoal.protocol.errors import SilentError
from shoal.protocol.net.clock import AnswerTimeout


async def test_timeout_of_an_answer_says_who_was_silent() -> None:
    with pytest.raises(SilentError, match="the peer fell silent"):
        async with AnswerTimeout(2.0, "the peer fell silent"):
            await asyncio.sleep(3.0)

    assert VirtualClock().now() == 2.0


@pytest.mark.parametrize(("outer_seconds", "is_outer"), [(1.0, True), (3.0, False)])
async def test_timeout_tells_whether_it_or_one_inside_has_expired(
    outer_seconds: float, is_outer: bool
) -> None:
    outer, inner = AnswerTimeout(outer_seconds, "late"), AnswerTimeout(2.0, "late")

    with pytest.raises(SilentError):
        async with outer, inner:
            await asyncio.sleep(9.0)

    assert (outer.has_expired, inner.has_expired) == (is_outer, not is_outer)


async def test_timeout_inside_that_is_not_the_answers_own_blames_nobody() -> None:
    with pytest.raises(TimeoutError):
        async with AnswerTimeout(60.0, "the peer fell silent"), asyncio.timeout(1.0):
            await asyncio.sleep(2.0)


async def test_time_in_which_the_process_stood_still_is_not_held_against_a_peer() -> None:
    async with AnswerTimeout(2.0, "the peer fell silent"):
        await asyncio.sleep(1.0)
        VirtualClock().stall(100.0)
        await asyncio.sleep(1.5)

    assert VirtualClock().now() == 102.5
