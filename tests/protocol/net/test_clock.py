"""Timeouts of answers."""

import asyncio

import pytest
from virtual_time import VirtualClock, run_virtual

from shoal.protocol.errors import SilentError
from shoal.protocol.net.clock import AnswerTimeout


def test_timeout_of_an_answer_says_who_was_silent() -> None:
    async def wait() -> float:
        with pytest.raises(SilentError, match="the peer fell silent"):
            async with AnswerTimeout(2.0, "the peer fell silent"):
                await asyncio.sleep(3.0)
        return VirtualClock().now()

    assert run_virtual(wait()) == 2.0


def test_time_in_which_the_process_stood_still_is_not_held_against_a_peer() -> None:
    async def wait() -> float:
        async with AnswerTimeout(2.0, "the peer fell silent"):
            await asyncio.sleep(1.0)
            VirtualClock().stall(100.0)
            await asyncio.sleep(1.5)
        return VirtualClock().now()

    assert run_virtual(wait()) == 102.5
