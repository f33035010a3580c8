"""Steps that are recorded once: what they are padded to, and whose tensors they compute on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_devices import (
    attend_slowly,
    decode,
    draw_hidden,
    execute,
    load_engine,
    make_device,
    open_work,
)
from torch import Tensor

from shoal.peer.engine import decode_graphs
from shoal.peer.engine.decode_graphs import choose_size
from shoal.peer.engine.device import PagedDevice
from shoal.peer.engine.engine import Engine
from shoal.peer.engine.recorder import Recorder
from shoal.protocol.spans import Span
from shoal.protocol.tensors import KVFormat


class NotingRecorder(Recorder):
    """Calls like `CallingRecorder`, and notes how often it recorded and replayed."""

    def __init__(self) -> None:
        self.num_recorded = self.num_replayed = 0

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        self.num_recorded += 1

        def replay() -> None:
            self.num_replayed += 1
            function()

        return replay


@pytest.fixture
def recorder() -> NotingRecorder:
    return NotingRecorder()


@pytest.fixture
def engine(tiny_models: Any, recorder: NotingRecorder) -> Engine:
    return load_engine(tiny_models, make_device(recorder=recorder))


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


def test_each_size_is_recorded_once(engine: Engine, recorder: NotingRecorder) -> None:
    sizes = [1, 1, 2, 3, 4, 3, 5, 8, 64, 33]
    for num_sessions in sizes:
        step_alone_and_together(engine, num_sessions, KVFormat.FLOAT)

    assert recorder.num_recorded == len({1, 2, 4, 8, 64})
    assert recorder.num_replayed == 2 * len(sizes)

    step_alone_and_together(engine, 3, KVFormat.INT8)
    assert recorder.num_recorded == 6


def test_tables_that_grow_are_recorded_anew(
    tiny_models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_graphs, "LEAST_TABLE_PAGES", 2)
    recorder = NotingRecorder()
    engine = load_engine(tiny_models, make_device(recorder=recorder))
    plain = load_engine(tiny_models, PagedDevice(torch.device("cpu"), attend_slowly, None))
    tokens, other = draw_hidden(1, 1, 150), draw_hidden(2, 1, 150)

    outputs: list[list[Tensor]] = []
    for each in (engine, plain):
        works = [open_work(each, tokens[:, :1]), open_work(each, other[:, :1])]
        decoded = decode(each, works[:1], [tokens[:, :100]])
        outputs.append([*decoded, *decode(each, works, [tokens[:, 100:], other[:, 100:]])])

    for ours, theirs in zip(*outputs, strict=True):
        assert torch.equal(ours, theirs)
    # Of one row: 2 and 8 pages of 16 tokens. Of two: 8 and 32.
    assert recorder.num_recorded == 4


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
    return [
        states[:, :, : cache.length].clone()
        for block in range(cache.span.start, cache.span.stop)
        for states in cache.keys_values(block)
    ]


@pytest.mark.parametrize("case", ["prompt", "many rows", "two formats", "some blocks"])
def test_other_steps_are_computed_as_they_are(
    engine: Engine, recorder: NotingRecorder, case: str
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

    assert recorder.num_recorded == 0


@pytest.mark.parametrize("variant", ["bloom", "mixtral"])
def test_blocks_whose_shapes_depend_on_more_are_not_recorded(
    tiny_models: Any, recorder: NotingRecorder, variant: str
) -> None:
    engine = load_engine(tiny_models, make_device(recorder=recorder), variant)

    step_alone_and_together(engine, 2, KVFormat.FLOAT)

    assert recorder.num_recorded == 0


def test_step_that_fills_gives_way_once_before_it_is_replayed(engine: Engine) -> None:
    work, urgent = (open_work(engine, draw_hidden(n), decoded=True) for n in range(2))
    (expected,) = execute(engine, open_work(engine, draw_hidden(0), decoded=True))
    answers: list[Any] = []

    (output,) = engine.execute([work], lambda: answers.extend(engine.execute([urgent])))

    assert len(answers) == 1
    (expected_answer,) = execute(engine, open_work(engine, draw_hidden(1), decoded=True))
    assert torch.equal(answers[0], expected_answer)
    assert isinstance(output, Tensor)
    assert torch.equal(output, expected)
