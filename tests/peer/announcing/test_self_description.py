"""What a peer says of itself: its kernels, measured with the threads it was given, and its load."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.kernels.linear import select
from shoal.kernels.linear.quantize import Int8Kernel, WeightFormat
from shoal.kernels.native.library import list_instruction_sets
from shoal.models.checkpoints.checkpoint import Checkpoint
from shoal.peer.announcing.self_description import SelfDescription, make_template
from shoal.peer.engine.engine import Engine
from shoal.peer.engine.loading.engine_loader import load_engine
from shoal.peer.process.background import LoopLag
from shoal.peer.process.config import PeerConfig
from shoal.protocol.endpoints import Endpoint, Relay
from shoal.protocol.identity import Identity
from shoal.protocol.ids import ModelId
from shoal.protocol.net.clock import SystemClock
from shoal.protocol.net.network import Addresses
from shoal.protocol.records.announcements import Announcement, PeerState
from shoal.protocol.spans import Span

SPAN = Span(0, 2)


@pytest.fixture
def threads_at_choice(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Have kernels chosen anew; yield how many threads torch had each time."""
    threads: list[int] = []
    choose_fastest = select.choose_fastest

    def choose(kernels: Sequence[Int8Kernel], read_clock: Callable[[], float]) -> Int8Kernel:
        threads.append(torch.get_num_threads())
        return choose_fastest(kernels, read_clock)

    before = torch.get_num_threads()
    monkeypatch.setattr(select, "choose_fastest", choose)
    select.choose_int8_kernel.cache_clear()
    yield threads
    torch.set_num_threads(before)
    select.choose_int8_kernel.cache_clear()


def load(tiny_models: Any, weights: WeightFormat, variant: str = "llama", **options: Any) -> Engine:
    checkpoint = Checkpoint.open(tiny_models.get(variant).directory)
    return load_engine(checkpoint, SPAN, weights, kv_budget_bytes=2**24, **options)


def test_kernels_are_measured_with_the_threads_of_the_engine(
    tiny_models: Any, threads_at_choice: list[int]
) -> None:
    config = PeerConfig(model=tiny_models.get().directory, weights="int8", num_threads=3)

    template = make_template(config, ModelId("a" * 32), 4, make_presence())
    engine = load(tiny_models, WeightFormat.INT8, num_threads=config.num_threads)

    assert template.kernels == ""
    assert threads_at_choice == [3]
    assert engine.kernels.startswith(select.choose_int8_kernel("cpu").name)


def test_weights_in_floats_need_no_measurement(
    tiny_models: Any, threads_at_choice: list[int]
) -> None:
    load(tiny_models, WeightFormat.FP32)

    assert threads_at_choice == []


@pytest.mark.parametrize(
    ("variant", "weights"),
    [
        ("llama", WeightFormat.BF16),
        ("gemma2", WeightFormat.INT8),
        ("bloom", WeightFormat.FP32),
        ("wrapped-stablelm", WeightFormat.FP32),
    ],
)
def test_attention_that_c_cannot_compute_is_said_to_be_of_torch(
    tiny_models: Any, variant: str, weights: WeightFormat
) -> None:
    assert load(tiny_models, weights, variant).kernels.endswith(", attention: torch")


def make_presence(*hosts: str, relays: Sequence[Relay] = ()) -> Any:
    return SimpleNamespace(
        identity=Identity(bytes(32)),
        addresses=Addresses([Endpoint(host, 1, "f" * 64) for host in hosts or ("127.0.0.1",)], {}),
        relays=relays,
        directory_port=0,
    )


def test_peer_behind_relays_announces_its_addresses_to_its_own_network_only(
    tiny_models: Any,
) -> None:
    config, hosts = PeerConfig(model=tiny_models.get().directory), ("10.0.1.2", "198.51.100.7")
    relays = (Relay("192.0.2.7", 4001, Identity(bytes([1]) * 32).peer_id),)

    dialled, relayed = (
        make_template(config, ModelId("a" * 32), 4, make_presence(*hosts, relays=through))
        for through in ((), relays)
    )

    assert [endpoint.host for endpoint in dialled.endpoints] == list(hosts)
    assert [endpoint.host for endpoint in relayed.local_endpoints] == ["10.0.1.2"]
    assert (dialled.local_endpoints, relayed.endpoints) == ((), ())


def describe_busy_thread(announcement: Announcement) -> Announcement:
    return replace(announcement, queue_seconds=0.5, pass_queue_seconds=20.00001)


def test_announcement_tells_how_long_steps_and_passes_wait(tiny_models: Any) -> None:
    config = PeerConfig(model=tiny_models.get().directory)
    template = make_template(config, ModelId("a" * 32), 4, make_presence())
    engine = load(tiny_models, WeightFormat.FP32)
    description = SelfDescription(template, LoopLag(SystemClock()), (1.0,) * 4)
    begin = partial(description.begin_serving, engine.span, engine.kernels, engine.device.name)
    begin(10.0, 100.0, [describe_busy_thread])

    told = description.describe(PeerState.ONLINE, 1, 1000.0)

    assert (told.queue_seconds, told.pass_queue_seconds) == (0.5, 20.0)


@pytest.mark.parametrize("weights", [WeightFormat.FP32, WeightFormat.INT8])
def test_attention_in_c_is_called_by_its_instruction_set(
    tiny_models: Any, weights: WeightFormat
) -> None:
    engine = load(tiny_models, weights)

    *_, names = engine.kernels.split(", attention: ")

    of_tokens, of_prompts = map(list_instruction_sets, ("attention", "prompt_attention"))
    assert set(names.split(" and ")) <= {*of_tokens, *of_prompts, "torch"}
    assert next(iter(of_tokens), "torch") in names
