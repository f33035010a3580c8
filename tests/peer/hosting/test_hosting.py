"""Loading spans for real: what goes wrong is told, and what is there is kept for the way back."""

from __future__ import annotations

import asyncio
import shutil
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_devices import SLOWLY
from memory_swarm import MemorySwarm, SceneLoader
from virtual_time import run_virtual

from shoal.peer.engine.devices.device import CPU, CallingCapturer, Capturer, Device, PagedDevice
from shoal.peer.engine.engine import Engine
from shoal.peer.engine.loading import engine_loader
from shoal.peer.engine.steps import ComputedStep, StepWork
from shoal.peer.hosting import hosted_model, span_loader
from shoal.peer.hosting.hosted_model import RESERVE_BYTES, HostedModel
from shoal.peer.hosting.span_loader import LoadError, SpanLoader
from shoal.peer.hosting.throughput import Throughput
from shoal.peer.process.config import PeerConfig
from shoal.protocol.errors import UsageError
from shoal.protocol.net.clock import Clock, SystemClock
from shoal.protocol.spans import Span

FIRST, LAST = Span(0, 2), Span(2, 4)


@pytest.fixture
def directory(tiny_models: Any, tmp_path: Path) -> Path:
    """A checkpoint in many files."""
    tiny_models.get("llama").reference.save_pretrained(tmp_path / "model", max_shard_size="50KB")
    return tmp_path / "model"


def run(
    directory: Path, test: Callable[[SpanLoader], Awaitable[None]], device: Device = CPU
) -> None:
    async def main() -> None:
        model = open_model(directory)
        model = replace(model, numerics=replace(model.numerics, device=device))
        await test(SpanLoader(model, SystemClock()))

    asyncio.run(main())


def open_model(directory: Path) -> HostedModel:
    return HostedModel.open(PeerConfig(str(directory), FIRST, weights="fp32", block_cache_bytes=0))


async def load(loader: SpanLoader, span: Span, kept: Any = None) -> tuple[int, dict[int, Any]]:
    """Serve a span for a moment; return its first block and what is kept for a move to `LAST`."""
    async with loader.serve(span, kept or {}, lambda *_: None) as served:
        assert served.throughput.decode_steps_per_second > 0
        return served.engine.span.start, loader.keep_blocks(served.engine, LAST)


@pytest.mark.parametrize(
    ("idle_for", "is_measured"), [([True] * 11, True), ([False], False), ([True] * 4, False)]
)
def test_span_is_measured_again_only_while_the_peer_is_idle(
    directory: Path, idle_for: list[bool], is_measured: bool
) -> None:
    async def test(loader: SpanLoader) -> None:
        answers = iter(idle_for)
        async with loader.serve(FIRST, {}, lambda *_: None) as served:
            free_bytes = served.engine.pool.free_tokens

            measured = await loader.measure_again(served, lambda: next(answers, False))

            await served.compute.call(lambda: None)  # it has closed the cache by then
            assert served.engine.pool.free_tokens == free_bytes
            assert (measured is not None) == is_measured
            if measured is not None:
                assert measured.decode_steps_per_second > 0
                assert measured.prefill_tokens_per_second > 0

    run(directory, test)


def test_first_step_of_each_kind_does_not_count_where_a_span_is_measured_again(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter([100.0, 1.0, 100.0, *[1.0] * 7])
    num_tokens: list[int] = []

    async def test(loader: SpanLoader) -> None:
        async with loader.serve(FIRST, {}, lambda *_: None) as served:
            submit = served.compute.submit

            async def time_step(work: StepWork) -> ComputedStep:
                num_tokens.append(work.hidden_BTH.shape[1])
                return replace(await submit(work), compute_seconds=next(seconds))

            monkeypatch.setattr(served.compute, "submit", time_step)
            measured = await loader.measure_again(served, lambda: True)

            assert measured == Throughput(1.0, float(num_tokens[0]))
            assert num_tokens == [num_tokens[0]] * 2 + [1] * 8

    run(directory, test)


def test_full_cache_is_no_reason_to_end_where_a_span_is_measured_again(directory: Path) -> None:
    async def test(loader: SpanLoader) -> None:
        async with loader.serve(FIRST, {}, lambda *_: None) as served:
            served.engine.pool.budget_bytes = 0
            assert await loader.measure_again(served, lambda: True) is None

    run(directory, test)


def find_file_of_last_block(directory: Path) -> Path:
    """Return a file that holds nothing of the others."""
    for path in sorted(directory.glob("model-*.safetensors")):
        content = path.read_bytes()
        if b"layers.3." in content and b"layers.2." not in content:
            return path
    raise AssertionError("there is none")


@pytest.mark.parametrize("harm", ["missing", "truncated"])
def test_block_that_cannot_be_loaded_is_named(directory: Path, harm: str) -> None:
    async def test(loader: SpanLoader) -> None:
        _, kept = await load(loader, FIRST)
        path = find_file_of_last_block(directory)
        if harm == "missing":
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[:-1])

        with pytest.raises(
            LoadError, match=f"block 3 cannot be loaded: .*{path.name} is {harm}"
        ) as caught:
            await load(loader, LAST, kept)

        assert caught.value.blocks == {3}
        shutil.rmtree(directory)  # the way back needs no file
        assert (await load(loader, FIRST, kept))[0] == 0

    run(directory, test)


def test_blocks_are_kept_for_the_way_back_where_memory_holds_both(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(loader: SpanLoader) -> None:
        sizes = open_model(directory).sizes
        needed_bytes = sizes.loading_bytes + sum(sizes.num_bytes[2:])
        for free_bytes, num_kept in ((needed_bytes, 0), (needed_bytes + RESERVE_BYTES, 2)):
            monkeypatch.setattr(hosted_model, "read_free_bytes", lambda free=free_bytes: free)
            assert len((await load(loader, FIRST))[1]) == num_kept

        monkeypatch.setattr(hosted_model, "read_free_bytes", lambda: needed_bytes)
        loader.check_room(LAST, {})
        monkeypatch.setattr(hosted_model, "read_free_bytes", lambda: needed_bytes - 1)
        with pytest.raises(
            LoadError, match="blocks 2:4 need another 0 MiB, but only 0 MiB are free"
        ) as no:
            loader.check_room(LAST, {})
        assert no.value.blocks == {2, 3}

    run(directory, test)


@pytest.mark.parametrize(
    ("told", "free_bytes", "pass_bytes", "adapter_bytes"),
    [
        (None, 2**32, 2**29, 2**28),
        (None, 2**40, 2**32, 2**29),
        (2**28, 2**33, 2**28, 2**28),
        (0, 2**33, 0, 0),
    ],
)
def test_passes_and_adapters_have_the_memory_that_was_told_or_a_part_of_what_is_free(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    told: int | None,
    free_bytes: int,
    pass_bytes: int,
    adapter_bytes: int,
) -> None:
    monkeypatch.setattr(hosted_model, "read_free_bytes", lambda: free_bytes)
    config = PeerConfig(
        str(directory), FIRST, pass_bytes=told, adapter_bytes=told, block_cache_bytes=0
    )
    model = HostedModel.open(config)

    assert (model.pass_bytes, model.adapter_bytes) == (pass_bytes, adapter_bytes)

    async def test() -> None:
        def open_loader(_: PeerConfig, clock: Clock) -> SceneLoader:
            return SceneLoader(model, clock)

        async with MemorySwarm().serve("peer", config, open_loader) as peer:
            assert peer.training.resources.budget.num_bytes == pass_bytes
            assert f"/{adapter_bytes}," in repr(peer.adapters.shared)

    run_virtual(test())


def test_more_blocks_than_the_model_has_are_refused(directory: Path) -> None:
    with pytest.raises(UsageError, match=r"--num-blocks 99 is more than the model has: \d"):
        HostedModel.open(PeerConfig(str(directory), num_blocks=99))


@pytest.mark.parametrize("chosen", [{"span": FIRST}, {"num_blocks": 2}, {}])
def test_more_memory_than_is_free_is_refused_with_each_share(
    chosen: dict[str, Any], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosted_model, "read_free_bytes", lambda: 2**31)
    config = PeerConfig(str(directory), **chosen, pass_bytes=2**30, adapter_bytes=2**25)
    shares = r"\d for weights, 1,024 for KV caches \(--kv-memory\), 1,024 for training"

    with pytest.raises(UsageError, match=rf"need 2,787 MiB of memory and 2,048 are free: {shares}"):
        HostedModel.open(config)
    HostedModel.open(replace(config, pass_bytes=2**28))


class SmallDevice(PagedDevice):
    """The CPU with a memory of its own, of which a test says how much is free."""

    def __init__(self, capturer: Capturer | None = None) -> None:
        super().__init__(torch.device("cpu"), SLOWLY, capturer or CallingCapturer())
        self.free_bytes = 2**40

    def read_free_bytes(self) -> int | None:
        return self.free_bytes


@pytest.mark.parametrize("machine_bytes", [0, 2**40])
def test_room_is_that_of_the_device_however_much_the_machine_has(
    directory: Path, monkeypatch: pytest.MonkeyPatch, machine_bytes: int
) -> None:
    device = SmallDevice()

    async def test(loader: SpanLoader) -> None:
        monkeypatch.setattr(hosted_model, "read_free_bytes", lambda: machine_bytes)
        assert len((await load(loader, FIRST))[1]) == 2
        loader.check_room(LAST, {})

        device.free_bytes = 0
        assert len((await load(loader, FIRST))[1]) == 0
        with pytest.raises(LoadError, match="but only 0 MiB are free"):
            loader.check_room(LAST, {})

    run(directory, test, device)


class FullCapturer(Capturer):
    """Finds no memory left for what it captures."""

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        raise torch.OutOfMemoryError("no memory")


def test_span_whose_steps_find_no_memory_cannot_be_loaded_and_leaves_its_own(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines: list[weakref.ref[Engine]] = []

    def load_and_watch(*arguments: Any, **options: Any) -> Engine:
        engine = engine_loader.load_engine(*arguments, **options)
        engines.append(weakref.ref(engine))
        return engine

    monkeypatch.setattr(span_loader, "load_engine", load_and_watch)

    async def test(loader: SpanLoader) -> None:
        facts = None
        try:  # what `pytest.raises` returns would hold on to the engine
            await load(loader, LAST)
        except LoadError as error:
            facts = (str(error), error.blocks)
        assert facts is not None
        assert "cpu has memory for blocks 2:4, but not for steps" in facts[0]
        assert facts[1] == {2, 3}
        assert [engine() for engine in engines] == [None]

    run(directory, test, SmallDevice(FullCapturer()))


def test_memory_of_a_run_beside_is_left_to_it(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = PeerConfig(str(directory), Span(0, 1), kv_budget_bytes=2**24, pass_bytes=0)
    config = replace(config, adapter_bytes=0)
    alone = HostedModel.open(config)
    uses = alone.message_bytes + alone.announcement_bytes + 2**24 + 2**20
    monkeypatch.setattr(hosted_model, "read_free_bytes", lambda: uses)
    HostedModel.open(config)

    with pytest.raises(UsageError, match=r"1 for a stage of the run \(--train\)"):
        HostedModel.open(replace(config, run_bytes=2**20))
