"""Writers compare every token, and say what went wrong where."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from chaos.writers import LONGEST_TEXT, Stall, Tally, Task, Writer, write
from torch import Tensor

from shoal.client import AutoDistributedModelForCausalLM
from shoal.peer.local_swarm.loopback import LoopbackSwarm

pytestmark = pytest.mark.slow

Disturb = Callable[[LoopbackSwarm], None]


class StopAfter(Tally):
    """A tally that ends the work after some texts."""

    def __init__(self, num_texts: int, stop: threading.Event) -> None:
        super().__init__()
        self._enough = num_texts
        self._stop = stop

    def add(self, num_tokens: int, num_failovers: int, stall: Stall) -> None:
        super().add(num_tokens, num_failovers, stall)
        if self.num_texts >= self._enough:
            self._stop.set()


def run_writer(
    tiny: Any, expected: list[Tensor], num_texts: int = 2, disturb: Disturb = lambda swarm: None
) -> Writer:
    """Have one client write in a swarm of its own."""
    stop = threading.Event()

    def connect(**settings: Any) -> Any:
        swarm = LoopbackSwarm(tiny.directory, [(0, 2), (2, 4), (2, 4)], seed=1)
        model = AutoDistributedModelForCausalLM.from_pretrained(
            tiny.directory, connect=swarm.connect, failover_timeout_seconds=0.5, **settings
        )  # fmt: skip
        disturb(swarm)
        return model

    task = Task(connect, make_prompts(), expected, lambda id_: id_[-6:], lambda: "now", stop)
    writer = Writer(0, 7, task, StopAfter(num_texts, stop))
    writer.run()
    return writer


def make_prompts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(3, 128, (1, length), generator=generator) for length in (5, 40)]


@pytest.fixture(scope="module")
def tiny(tiny_models: Any) -> Any:
    return tiny_models.get()


@pytest.fixture(scope="module")
def expected(tiny: Any) -> list[Tensor]:
    return [write(tiny.reference, prompt, LONGEST_TEXT) for prompt in make_prompts()]


def test_writer_finds_nothing_wrong_in_a_sound_swarm(tiny: Any, expected: list[Tensor]) -> None:
    writer = run_writer(tiny, expected, num_texts=4)

    assert writer.failure is None


def test_writer_tells_the_first_token_that_is_wrong(tiny: Any, expected: list[Tensor]) -> None:
    wrong = [text.clone() for text in expected]
    for text in wrong:
        text[0, -LONGEST_TEXT + 3] += 1

    failure = run_writer(tiny, wrong).failure

    assert failure is not None
    assert "token 8 is" in failure.what or "token 43 is" in failure.what
    assert len(failure.peers) == 2


def test_writer_tells_why_a_text_was_not_finished(tiny: Any, expected: list[Tensor]) -> None:
    def kill_first(swarm: LoopbackSwarm) -> None:
        swarm.network.kill("peer0")

    failure = run_writer(tiny, expected, disturb=kill_first).failure

    assert failure is not None
    assert "RouteError" in failure.what
    assert "now, client 1 (chain), for " in failure.what
    assert "online" in failure.what
