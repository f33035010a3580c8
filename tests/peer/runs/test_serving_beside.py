"""Peers that serve a model and take part in a training run, under one identity and at one port."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import training_runs
from memory_swarm import MODEL_ID, MemorySwarm, SceneLoader
from run_swarm import COMPUTE_CLASS, OWNER
from service_scene import (
    HELLO,
    Talk,
    compute_alone,
    draw_hidden,
    expect_output,
    make_open,
    make_step,
)
from virtual_time import VirtualClock, run_virtual

from shoal.peer.engine.training.span_state import digest_tensors
from shoal.peer.process.config import PeerConfig
from shoal.peer.runs.run_peer import RunPeer, open_run
from shoal.peer.runs.run_resources import RunPeerConfig, make_compute
from shoal.protocol.messages.session import Opened, Welcome
from shoal.protocol.net.memory.loopback import LoopbackTransport
from shoal.protocol.runs.run_record import sign_run


async def compute_slowly(function: Callable[[], Any]) -> Any:
    await asyncio.sleep(0.01)
    return function()


def test_peers_serve_steps_while_they_train_exactly(engine: Any, tmp_path: Path) -> None:
    run, shards = training_runs.open_run(tmp_path)
    record = sign_run(OWNER, run, [])
    expected = compute_alone(engine, draw_hidden(1))

    async def scene() -> str:
        swarm = MemorySwarm()
        async with AsyncExitStack() as stack, asyncio.timeout(300.0):
            peers = list[RunPeer]()
            served = []
            for stage in (0, 1):
                config = PeerConfig("", engine.span, drain_seconds=0.0)
                loader = SceneLoader.of_engine(engine)
                inside = await stack.enter_async_context(
                    swarm.serve(f"peer{stage}", config, loader)
                )
                served.append(inside)
                run_config = RunPeerConfig(record, tmp_path, (stage,), founds_run=stage == 0)
                clock = VirtualClock()
                opening = open_run(
                    run_config, clock, compute=compute_slowly, compute_class=COMPUTE_CLASS
                )
                resources = await stack.enter_async_context(opening)
                joining = RunPeer.join(inside.peer.joined, resources, clock)
                swarm.store.is_reachable = False  # it announces itself again soon
                peers.append(await stack.enter_async_context(joining))
                swarm.store.is_reachable = True
            over = asyncio.gather(*(peer.loop.is_over.wait() for peer in peers))
            training = [asyncio.create_task(peer.serve(over)) for peer in peers]
            client = LoopbackTransport(swarm.network, "client")
            stack.push_async_callback(client.close)
            num_steps = 0
            while not over.done():
                talk = Talk(await client.open_stream(served[num_steps % 2].endpoint))
                welcome = await talk.ask(HELLO)
                assert isinstance(welcome, Welcome)
                assert welcome.model_id == MODEL_ID
                assert isinstance(await talk.ask(make_open(1 + num_steps)), Opened)
                answer = await talk.ask(make_step(1, 0, draw_hidden(1), 1 + num_steps))
                assert torch.equal(expect_output(answer), expected[0])
                await talk.stream.close()
                num_steps += 1
                await asyncio.sleep(0.2)
            await asyncio.gather(*training)
            assert num_steps > 3
            weights: dict[str, Any] = {}
            for peer in peers:
                assert peer.loop.stage is not None
                weights |= peer.loop.stage.span.read_weights()
            return digest_tensors(weights)

    assert run_virtual(scene()) == training_runs.train_alone(run, shards)


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")
async def test_thread_that_trains_beside_a_model_has_the_lowest_priority() -> None:
    def read_priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    with ExitStack() as stack:
        beside, alone = make_compute(stack, is_beside=True), make_compute(stack)
        assert await beside(read_priority) == 19
        assert await alone(read_priority) == read_priority()
