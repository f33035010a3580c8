"""Steps that are captured once: what they are padded to, and whose tensors they compute on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_devices import (
    SLOWLY,
    decode,
    draw_hidden,
    execute,
    load_engine,
    make_device,
    open_work,
)
from torch import Tensor

from shoal.kernels.linear.quantize import WeightFormat
from shoal.models.checkpoints.checkpoint import Checkpoint
from shoal.peer.engine import decode_graphs
from shoal.peer.engine.decode_graphs import choose_size
from shoal.peer.engine.devices.device import Capturer, PagedDevice
from shoal.peer.engine.engine import Engine
from shoal.peer.engine.loading import engine_loader
from shoal.peer.hosting.throughput import measure_throughput
from shoal.protocol.spans import Span
from shoal.protocol.tensors import KVFormat


class NotingCapturer(Capturer):
    """Calls like `CallingCapturer`, and notes how often it captured and ran again."""

    def __init__(self) -> None:
        self.num_captured = self.num_repeated = 0

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        self.num_captured += 1

        def run_again() -> None:
            self.num_repeated += 1
            function()

        return run_again


@pytest.fixture
def capturer() -> NotingCapturer:
    return NotingCapturer()


@pytest.fixture
def engine(tiny_models: Any, capturer: NotingCapturer) -> Engine:
    return load_engine(tiny_models, make_device(capturer=capturer))


@pytest.mark.parametrize(
    ("step", "size"),
    [
        ((1, 1), (1, 64)),
        ((2, 64), (2, 64)),
        ((3, 65), (4, 256)),
        ((33, 256), (64, 256)),
        ((64, 257), (64, 1024)),
    ],
)
def test_steps_are_padded_to_few_sizes(step: tuple[int, int], size: tuple[int, int]) -> None:
    assert choose_size(*step) == size


def step_alone_and_together(engine: Engine, num_sessions: int, kv_format: KVFormat) -> None:
    works = [open_work(engine, draw_hidden(n), kv_format) for n in range(num_sessions)]
    tokens = [draw_hidden(n, 1, 2) for n in range(num_sessions)]
    decode(engine, works, tokens)


def test_each_size_is_captured_once(engine: Engine, capturer: NotingCapturer) -> None:
    sizes = [1, 1, 2, 3, 4, 3, 5, 8, 64, 33]
    for num_sessions in sizes:
        step_alone_and_together(engine, num_sessions, KVFormat.FLOAT)

    assert capturer.num_captured == len({1, 2, 4, 8, 64})
    assert capturer.num_repeated == 2 * len(sizes)

    step_alone_and_together(engine, 3, KVFormat.INT8)
    assert capturer.num_captured == 6


@pytest.mark.slow
def test_tables_that_grow_are_captured_anew(
    tiny_models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_graphs, "LEAST_TABLE_PAGES", 2)
    capturer = NotingCapturer()
    engine = load_engine(tiny_models, make_device(capturer=capturer))
    plain = load_engine(tiny_models, PagedDevice(torch.device("cpu"), SLOWLY, None))
    tokens, other = draw_hidden(1, 1, 150), draw_hidden(2, 1, 150)

    outputs: list[list[Tensor]] = []
    for each in (engine, plain):
        works = [open_work(each, tokens[:, :1]), open_work(each, other[:, :1])]
        decoded = decode(each, works[:1], [tokens[:, :100]])
        outputs.append([*decoded, *decode(each, works, [tokens[:, 100:], other[:, 100:]])])

    for ours, theirs in zip(*outputs, strict=True):
        assert torch.equal(ours, theirs)
    # Of one row: 2 and 8 pages of 16 tokens. Of two: 8 and 32.
    assert capturer.num_captured == 4


@pytest.mark.parametrize("kv_format", KVFormat)
def test_rows_that_are_left_over_from_a_larger_step_write_nowhere(
    engine: Engine, kv_format: KVFormat
) -> None:
    """Of eight sessions five go on; the caches of the other three stay as they are."""
    works = [open_work(engine, draw_hidden(n), kv_format) for n in range(8)]
    decode(engine, works, [draw_hidden(n, 1, 3) for n in range(8)])
    before = [read_states(work.cache) for work in works[5:]]

    decode(engine, works[:5], [draw_hidden(n, 1, 3) for n in range(5)])

    for work, states in zip(works[5:], before, strict=True):
        assert all(map(torch.equal, read_states(work.cache), states))


def read_states(cache: Any) -> list[Tensor]:
    """As bytes: places in a page that are never written may hold a NaN, which equals nothing."""
    return [
        states[:, :, : cache.length].clone().view(torch.int8)
        for block in range(cache.span.start, cache.span.stop)
        for states in cache.memory.read_packed(block, cache.length)
    ]


@pytest.mark.parametrize("case", ["prompt", "many rows", "two formats", "some blocks"])
def test_other_steps_are_computed_as_they_are(
    engine: Engine, capturer: NotingCapturer, case: str
) -> None:
    token = draw_hidden(1)
    works = [open_work(engine, token, decoded=True)]
    if case == "prompt":
        works.append(open_work(engine, draw_hidden(2, 1, 5)))
    elif case == "many rows":
        works += [open_work(engine, draw_hidden(n), decoded=True) for n in range(64)]
    elif case == "two formats":
        works.append(open_work(engine, token, KVFormat.INT8, decoded=True))
    else:
        works = [open_work(engine, token, span=Span(1, 3), decoded=True)]

    execute(engine, *works)

    assert capturer.num_captured == 0


@pytest.mark.parametrize("variant", ["bloom", "mixtral"])
def test_blocks_whose_shapes_depend_on_more_are_not_captured(
    tiny_models: Any, capturer: NotingCapturer, variant: str
) -> None:
    engine = load_engine(tiny_models, make_device(capturer=capturer), variant)

    step_alone_and_together(engine, 2, KVFormat.FLOAT)

    assert capturer.num_captured == 0


@pytest.mark.parametrize(("budget_bytes", "num_sizes"), [(2**25, 7), (2**20, 4)])
def test_steps_of_every_size_that_fits_are_captured_while_a_peer_measures_itself(
    tiny_models: Any, capturer: NotingCapturer, budget_bytes: int, num_sizes: int
) -> None:
    checkpoint = Checkpoint.open(tiny_models.get().directory)
    engine = engine_loader.load_engine(
        checkpoint, Span(0, 4), WeightFormat.FP32, device=make_device(capturer=capturer),
        kv_budget_bytes=budget_bytes,
    )  # fmt: skip

    measure_throughput(engine)

    assert capturer.num_captured == num_sizes
    assert engine.pool.used_bytes == 0
    step_alone_and_together(engine, 7, KVFormat.FLOAT)
    assert capturer.num_captured == num_sizes


class FailingCapturer(NotingCapturer):
    """Has no memory left when it is asked first."""

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        run_again = super().capture(function)
        if self.num_captured == 1:
            raise torch.OutOfMemoryError("no memory")
        return run_again


def test_step_that_could_not_be_captured_is_captured_the_next_time(tiny_models: Any) -> None:
    engine = load_engine(tiny_models, make_device(capturer=FailingCapturer()))
    plain = load_engine(tiny_models, PagedDevice(torch.device("cpu"), SLOWLY, None))
    works = [open_work(each, draw_hidden(1), decoded=True) for each in (engine, plain)]

    with pytest.raises(torch.OutOfMemoryError):
        engine.execute(works[:1])
    works[0].cache.fall_back(0)

    (ours,), (theirs,) = execute(engine, works[0]), execute(plain, works[1])
    assert torch.equal(ours, theirs)


def test_step_that_fills_gives_way_once_before_it_is_run_again(engine: Engine) -> None:
    work, urgent = (open_work(engine, draw_hidden(n), decoded=True) for n in range(2))
    (expected,) = execute(engine, open_work(engine, draw_hidden(0), decoded=True))
    answers: list[Any] = []

    (output,) = engine.execute([work], lambda: answers.extend(engine.execute([urgent])))

    assert len(answers) == 1
    (expected_answer,) = execute(engine, open_work(engine, draw_hidden(1), decoded=True))
    assert torch.equal(answers[0], expected_answer)
    assert isinstance(output, Tensor)
    assert torch.equal(output, expected)
