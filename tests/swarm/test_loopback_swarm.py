"""The swarm in this process as its users see it: a client on a thread of its own, and examples."""

from __future__ import annotations

import asyncio
import gc
import re
import runpy
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from memory_swarm import look_into
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from shoal.client import AutoDistributedModelForCausalLM
from shoal.peer.local_swarm.loopback import LoopbackSwarm
from shoal.protocol.errors import DirectoryError, ModelError, UsageError
from shoal.protocol.net.memory.loopback import Link
from shoal.protocol.spans import Span

ROOT = Path(__file__).resolve().parents[2]
REPLICAS = [(0, 2), (0, 2), (2, 4), (2, 4)]
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 24, "min_new_tokens": 24}


def make_prompt(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 128, (1, 3 + seed), generator=generator)


def tell(model: Any, prompt: Tensor) -> Tensor:
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), pad_token_id=0, **GREEDY)


def shoal_threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()} & {"compute", "shoal client"}


class Alarm:
    """A streamer that tells when the first new token has come."""

    def __init__(self) -> None:
        self.rang = threading.Event()
        self._num_puts = 0

    def put(self, value: Tensor) -> None:
        self._num_puts += 1
        if self._num_puts > 1:  # the first is the prompt
            self.rang.set()

    def end(self) -> None:
        self.rang.set()


@pytest.mark.slow
def test_padded_batch_survives_the_kill_of_a_peer(tiny_models: Any) -> None:
    tiny = tiny_models.get()
    ids = torch.cat([make_prompt(9) for _ in range(3)])
    mask = (torch.arange(ids.shape[1]) >= torch.tensor([[0], [4], [7]])).long()
    options = {"attention_mask": mask, "pad_token_id": 0, **GREEDY}
    expected = tiny.reference.generate(ids, **options)
    swarm = LoopbackSwarm(tiny.directory, REPLICAS)
    model = AutoDistributedModelForCausalLM.from_pretrained(tiny.directory, connect=swarm.connect)

    class KillLate(StoppingCriteria):
        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            if input_ids.shape[1] == ids.shape[1] + 5:
                swarm.network.kill("peer0")
            return torch.zeros(len(input_ids), dtype=torch.bool)

    with model:
        text: Any = model.generate(
            ids, stopping_criteria=StoppingCriteriaList([KillLate()]), **options
        )

    assert torch.equal(text, expected)


@pytest.mark.slow
def test_sessions_of_several_threads_survive_the_kill_of_a_peer(tiny_models: Any) -> None:
    tiny = tiny_models.get()
    prompts = [make_prompt(seed) for seed in range(4)]
    expected = [tell(tiny.reference, prompt) for prompt in prompts]
    swarm = LoopbackSwarm(tiny.directory, REPLICAS)
    model = AutoDistributedModelForCausalLM.from_pretrained(tiny.directory, connect=swarm.connect)

    with model, ThreadPoolExecutor(len(prompts)) as pool:
        alarm = Alarm()
        told: list[Future[Any]] = [
            pool.submit(model.generate, prompt, streamer=alarm, pad_token_id=0, **GREEDY)
            for prompt in prompts[:1]
        ]
        told += [pool.submit(tell, model, prompt) for prompt in prompts[1:]]
        assert alarm.rang.wait(60)
        swarm.network.kill("peer0")
        swarm.network.kill("peer3")

        assert all(
            torch.equal(text.result(60), right) for text, right in zip(told, expected, strict=True)
        )
    assert shoal_threads() == set()


def test_closing_the_model_ends_the_swarm(tiny_models: Any) -> None:
    directory = tiny_models.get().directory
    swarm = LoopbackSwarm(directory, [(0, 4)])
    model = AutoDistributedModelForCausalLM.from_pretrained(directory, connect=swarm.connect)
    session = model.transformer.h.open_session(64)
    session.step(torch.zeros(1, 1, 64))
    assert shoal_threads() == {"compute", "shoal client"}

    model.close()
    session.close()
    model.close()

    assert shoal_threads() == set()
    with pytest.raises(UsageError, match="while a client is connected"):
        swarm.network.kill("peer0")
    with pytest.raises(UsageError, match="closed"):
        model(make_prompt(0))
    del model, session
    gc.collect()


def test_closing_a_session_frees_the_caches_of_all_its_peers(tiny_models: Any) -> None:
    directory = tiny_models.get().directory
    swarm = LoopbackSwarm(directory, [(0, 1), (1, 4)])
    with AutoDistributedModelForCausalLM.from_pretrained(directory, connect=swarm.connect) as model:
        with model.inference_session(max_length=64):
            tell(model, make_prompt(1))
            used = [look_into(peer).engine.pool.used_bytes for peer in swarm.peers]
            assert all(used)

        async def wait_until_empty() -> list[Any]:
            for peer in swarm.peers:
                assert await look_into(peer).wait_until_empty(30)
            pools = [(look_into(peer).compute, look_into(peer).engine.pool) for peer in swarm.peers]
            return [
                await compute.call(lambda pool=pool: (pool.used_bytes, pool.num_sessions))
                for compute, pool in pools
            ]

        passes = model._client.passes  # on the loop of the peers
        assert passes.wait_for(wait_until_empty()) == [(0, 0), (0, 0)]


def test_network_refuses_hosts_that_do_not_exist(tiny_models: Any) -> None:
    directory = tiny_models.get().directory
    swarm = LoopbackSwarm(directory, [(0, 4)])
    with pytest.raises(UsageError, match="while a client is connected"):
        swarm.network.pause("peer0")

    with AutoDistributedModelForCausalLM.from_pretrained(directory, connect=swarm.connect):
        for act in (swarm.network.kill, swarm.network.pause, swarm.network.resume):
            with pytest.raises(UsageError, match="no host peer7, only client, peer0"):
                act("peer7")
        with pytest.raises(UsageError, match="no host somebody"):
            swarm.network.partition("somebody", "peer0")
        with pytest.raises(UsageError, match="no host nobody"):
            swarm.network.set_link("client", "nobody", Link())


def test_find_knows_the_peers_by_their_ids(tiny_models: Any) -> None:
    directory = tiny_models.get().directory
    swarm = LoopbackSwarm(directory, [(0, 2), Span(2, 4)])

    with AutoDistributedModelForCausalLM.from_pretrained(directory, connect=swarm.connect):
        assert [peer.host for peer in swarm.peers] == ["peer0", "peer1"]
        for peer in swarm.peers:
            assert swarm.find(peer.peer_id) is peer
        with pytest.raises(UsageError, match="no peer of this swarm"):
            swarm.find(swarm.peers[0].peer_id[:-1])  # pyright: ignore[reportArgumentType]


def test_swarm_serves_one_client_only(tiny_models: Any) -> None:
    directory = tiny_models.get().directory
    swarm = LoopbackSwarm(directory, [(0, 4)])

    with AutoDistributedModelForCausalLM.from_pretrained(directory, connect=swarm.connect) as model:
        with pytest.raises(UsageError, match="one client"):
            AutoDistributedModelForCausalLM.from_pretrained(directory, connect=swarm.connect)
        assert model(make_prompt(1)).logits.isfinite().all()
    with pytest.raises(UsageError, match="one client"):
        AutoDistributedModelForCausalLM.from_pretrained(directory, connect=swarm.connect)
    assert shoal_threads() == set()


@pytest.mark.parametrize(
    ("spans", "weights", "message"),
    [
        ([], "fp32", "at least one span"),
        ([(2, 1)], "fp32", "not a span"),
        ([(0, 2), (2, 5)], "fp32", "blocks 0:4, the span 2:5"),
        ([(0, 4)], "fp64", "weights"),
    ],
    ids=["no span", "a span backwards", "a span too long", "unknown weights"],
)
def test_swarm_that_cannot_be_is_refused_and_leaves_nothing(
    tiny_models: Any, spans: Any, weights: str, message: str
) -> None:
    directory = tiny_models.get().directory

    with pytest.raises(UsageError, match=message):
        AutoDistributedModelForCausalLM.from_pretrained(
            directory, connect=LoopbackSwarm(directory, spans, weights).connect
        )

    assert shoal_threads() == set()


def test_swarm_of_a_missing_model_names_it(tiny_models: Any, tmp_path: Path) -> None:
    swarm = LoopbackSwarm(tmp_path / "nowhere", [(0, 4)])

    with pytest.raises(ModelError, match="nowhere"):
        AutoDistributedModelForCausalLM.from_pretrained(
            tiny_models.get().directory, connect=swarm.connect
        )


@pytest.mark.parametrize("weights", ["int8", "bf16"])
def test_swarm_holds_the_weights_it_was_asked_for(tiny_models: Any, weights: str) -> None:
    directory = tiny_models.get().directory
    swarm = LoopbackSwarm(directory, [(0, 4)], weights)

    with AutoDistributedModelForCausalLM.from_pretrained(directory, connect=swarm.connect) as model:
        (peer,) = model._client.passes.wait_for(model._client.swarm.book.refresh()).peers
        logits = model(make_prompt(5)).logits

    assert peer.weights == weights
    with torch.no_grad():
        expected = tiny_models.get().reference(make_prompt(5)).logits
    assert 1e-4 < (logits - expected).abs().max() < 1.0


def test_dead_and_paused_hosts_announce_nothing(tiny_models: Any) -> None:
    async def main() -> None:
        swarm = LoopbackSwarm(tiny_models.get().directory, [(0, 4)] * 3)
        transport, directory = await swarm.connect().connect()
        model_id = look_into(swarm.peers[0]).model_id
        before = {peer.peer_id: peer.sequence for peer in await directory.lookup(model_id)}

        swarm.network.kill("peer0")
        swarm.network.pause("peer1")
        for peer in swarm.peers:
            await peer.peer.announcer.announce(peer.peer.announcer.state)

        after = {peer.peer_id: peer.sequence for peer in await directory.lookup(model_id)}
        moved = [after[peer.peer_id] > before[peer.peer_id] for peer in swarm.peers]
        assert moved == [False, False, True]
        await transport.close()
        await directory.close()
        with pytest.raises(DirectoryError):
            await directory.lookup(model_id)
        await directory.close()

    asyncio.run(main())
    assert shoal_threads() == set()


def test_cancelled_start_leaves_nothing(tiny_models: Any) -> None:
    async def main(num_turns: int) -> None:
        swarm = LoopbackSwarm(tiny_models.get().directory, [(0, 2), (2, 4)])
        connecting = asyncio.create_task(swarm.connect().connect())
        while not connecting.done() and num_turns:
            await asyncio.sleep(0.001 * (num_turns % 3))  # lets the loading threads go on
            num_turns -= 1
        connecting.cancel()
        await asyncio.wait([connecting])
        if not connecting.cancelled():
            transport, directory = connecting.result()
            await transport.close()
            await directory.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    for num_turns in (0, 1, 5, 20, 80):
        asyncio.run(main(num_turns))
        assert "compute" not in shoal_threads()


@pytest.mark.slow
def test_example_kills_a_host_and_tells_the_same_story(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "loopback_swarm.py"), run_name="__main__")

    printed = capsys.readouterr().out
    assert "was killed; 1 hop was replaced" in printed
    assert "the same words as without" in printed
    assert shoal_threads() == set()


@pytest.mark.slow
def test_example_reads_most_of_a_prompt_at_every_hop(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "read_prompts.py"), run_name="__main__")

    lines = capsys.readouterr().out.splitlines()
    found = [re.match(r"block (\d): (\d+) of (\d+): ", line) for line in lines]
    numbers = [tuple(map(int, one.groups())) for one in found if one]
    assert [block for block, _, _ in numbers] == [1, 3, 5, 7]
    assert all(num_right > 0.9 * num_tokens > 10 for _, num_right, num_tokens in numbers)
    assert shoal_threads() == set()
