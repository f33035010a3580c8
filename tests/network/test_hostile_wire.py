"""Strangers attack a real `shoal serve` while an honest client generates text through it.

Whatever comes, the peer answers with a typed refusal or ends that stream, the client's words stay
those of plain transformers, and nothing piles up in the peer.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from directory_processes import read_announcements
from hostile_attacks import ATTACKS, SEED, Attack
from hostile_strangers import Target, gather_gang

from shoal.client import AutoDistributedModelForCausalLM
from shoal.peer.local_swarm.swarm import LocalSwarm

pytestmark = [pytest.mark.network, pytest.mark.slow]

READING_SECONDS = 0.2
"""Between two texts of the client, which leaves a core to other tests."""

ATTACK_SECONDS = 300.0
"""For an attack that a broken peer never lets end; an honest one is through in a few seconds."""

MAX_GROWTH_BYTES = 48 * 2**20
"""What allocators may still keep the third time; the attacks together move 500 MiB."""


class HonestClient:
    """Generates text on a thread of its own for as long as the attack lasts."""

    def __init__(self, target: Target, model: Any) -> None:
        generator = torch.Generator().manual_seed(SEED)
        self._prompt = torch.randint(3, 128, (1, 12), generator=generator)
        self._reference = self._generate(target.tiny.reference)
        self._model = model

    def run(self, is_over: threading.Event) -> None:
        """Generate at least once, also after the end; every time the reference's words."""
        is_last = False
        while not is_last:
            is_last = is_over.wait(READING_SECONDS)
            assert torch.equal(self._generate(self._model), self._reference)

    def _generate(self, model: Any) -> torch.Tensor:
        return model.generate(self._prompt, max_new_tokens=16, min_new_tokens=16, do_sample=False)


async def attack(target: Target, client: HonestClient, attacks: tuple[Attack, ...]) -> None:
    """Carry attacks out beside an honest client, and see that the peer still stands."""
    is_over = threading.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(asyncio.to_thread(client.run, is_over))
        try:
            for carry_out in attacks:
                async with asyncio.timeout(ATTACK_SECONDS), gather_gang(target) as gang:
                    await carry_out(gang)
        finally:
            is_over.set()
    assert target.process.is_running
    assert "Traceback" not in target.process.log()


@pytest.fixture(scope="module")
def target(tiny_models: Any) -> Iterator[Target]:
    tiny = tiny_models.get("llama")
    with LocalSwarm(tiny.directory, spans=[(0, 4)], weights="fp32") as swarm:
        (found,) = asyncio.run(read_announcements(swarm)).values()
        yield Target(swarm.peers[0], found.endpoints[0], found.model_id, swarm, tiny)


@pytest.fixture(scope="module")
def client(target: Target) -> Iterator[HonestClient]:
    with AutoDistributedModelForCausalLM.from_pretrained(
        target.tiny.directory, initial_peers=target.swarm.initial_peers
    ) as model:
        yield HonestClient(target, model)


@pytest.mark.parametrize("carry_out", ATTACKS, ids=lambda attack: attack.__name__)
def test_attack_harms_nobody_else(target: Target, client: HonestClient, carry_out: Attack) -> None:
    asyncio.run(attack(target, client, (carry_out,)))


@pytest.mark.thorough  # half a minute; test_service_endings.py says what would be kept
def test_memory_does_not_keep_growing_under_attack(target: Target, client: HonestClient) -> None:
    """The first round may teach the allocators how much is needed; later ones need no more."""
    memory_bytes: list[int] = []
    for _ in range(4):
        asyncio.run(attack(target, client, ATTACKS))
        memory_bytes.append(target.memory_bytes)

    # The least of two: the allocators may keep a frame of 16 MiB and its pieces for a round.
    assert min(memory_bytes[2:]) - min(memory_bytes[:2]) < MAX_GROWTH_BYTES, memory_bytes
