from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import ClassVar, cast

import pytest
import torch
from engine_devices import HIDDEN, WHOLE, draw_hidden

from shoal.kernels.attention.native_attention import choose_prompt_instruction_set
from shoal.kernels.attention.rotary import RotaryTable
from shoal.kernels.linear.linear import Linear
from shoal.kernels.linear.quantize import ON_CPUS, WeightFormat
from shoal.models.checkpoints.checkpoint import Checkpoint
from shoal.models.spec_reader import read_spec
from shoal.models.specs.model_spec import ModelSpec
from shoal.peer.engine.blocks.batch import count_part_tokens
from shoal.peer.engine.blocks.block import Block
from shoal.peer.engine.cache.kv_cache import KVCachePool, SessionCache
from shoal.peer.engine.cache.kv_memory import PAGE_TOKENS
from shoal.peer.engine.cache.lazy_memory import LazyStore
from shoal.peer.engine.devices.device import Numerics
from shoal.peer.engine.engine import Engine
from shoal.peer.engine.loading import engine_loader
from shoal.peer.engine.loading.block_loader import load_block
from shoal.peer.engine.steps import StepWork
from shoal.protocol.errors import CacheFullError, ErrorCode, RefusedError
from shoal.protocol.spans import Span


def load_engine(
    tiny_models, weights=WeightFormat.FP32, span=WHOLE, budget=2**26, variant="llama"
) -> Engine:
    checkpoint = Checkpoint.open(tiny_models.get(variant).directory)
    return engine_loader.load_engine(checkpoint, span, weights, kv_budget_bytes=budget)


@pytest.fixture
def engine(tiny_models) -> Engine:
    return load_engine(tiny_models)


def make_work(
    engine: Engine, hidden: torch.Tensor, span: Span = WHOLE, max_tokens: int = 100, **options
) -> StepWork:
    """Open a fresh session and return its first step."""
    cache = engine.pool.open(hidden.shape[0], max_tokens, span)
    return StepWork(cache, 0, hidden, **options)


def expect_tensor(result: object) -> torch.Tensor:
    assert isinstance(result, torch.Tensor), result
    return result


def run(engine: Engine, work: StepWork) -> torch.Tensor:
    (result,) = engine.execute([work])
    return expect_tensor(result)


def assert_refused(result: object, code: ErrorCode) -> None:
    assert isinstance(result, RefusedError)
    assert result.code is code


@pytest.mark.parametrize("weights", ON_CPUS)
def test_compute_dtype_follows_the_weights(tiny_models, weights: WeightFormat) -> None:
    engine = load_engine(tiny_models, weights)
    output = run(engine, make_work(engine, draw_hidden(1, 1, 5).to(torch.float16)))

    expected = torch.bfloat16 if weights is WeightFormat.BF16 else torch.float32
    assert output.dtype == engine.dtype == expected


def test_last_token_only_returns_the_last_token(engine: Engine) -> None:
    hidden = draw_hidden(2, 3, 7)

    every = run(engine, make_work(engine, hidden))
    last = run(engine, make_work(engine, hidden, last_token_only=True))

    assert torch.equal(last, every[:, -1:])


@pytest.mark.parametrize(
    "spans",
    [
        [Span(0, 4), Span(0, 2), Span(1, 3), Span(3, 4), Span(0, 1)],
        [Span(0, 1), Span(3, 4)],  # with a gap between them
    ],
    ids=str,
)
def test_sessions_with_different_spans_share_a_batch(engine: Engine, spans: list[Span]) -> None:
    hidden = [draw_hidden(seed, 1 + seed % 3, 1 + 4 * seed) for seed in range(len(spans))]
    pairs = list(zip(hidden, spans, strict=True))

    alone = [run(engine, make_work(engine, *pair)) for pair in pairs]
    together = engine.execute([make_work(engine, *pair) for pair in pairs])

    for output, expected in zip(together, alone, strict=True):
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weights", [WeightFormat.FP32, WeightFormat.INT8])
@pytest.mark.parametrize("variant", ["llama", "gemma2", "mixtral", "falcon", "bloom"])
def test_batch_that_is_interrupted_at_every_block_gives_the_same_bits(
    tiny_models, variant: str, weights: WeightFormat
) -> None:
    engine = load_engine(tiny_models, weights, variant=variant)
    hidden = [draw_hidden(1, 1, 40), draw_hidden(2, 2, 7), draw_hidden(3)]
    alone = [run(engine, make_work(engine, each)) for each in hidden]
    token = draw_hidden(4, 3)
    expected_token = run(engine, make_work(engine, token))
    answers: list[torch.Tensor] = []

    def interrupt() -> None:
        answers.append(run(engine, make_work(engine, token)))
        engine.pool.check_integrity()

    works = [make_work(engine, each) for each in hidden]
    together = engine.execute(works)
    works = [make_work(engine, each) for each in hidden]
    interrupted = engine.execute(works, interrupt)

    assert len(answers) == len(WHOLE)
    assert all(torch.equal(answer, expected_token) for answer in answers)
    for output, undisturbed, expected in zip(interrupted, together, alone, strict=True):
        assert torch.equal(expect_tensor(output), expect_tensor(undisturbed))
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


def take_snapshot(cache: SessionCache) -> tuple[int, int, list[torch.Tensor]]:
    states = [
        state[:, :, : cache.length].clone()
        for block in range(cache.span.start, cache.span.stop)
        for state in cache.memory.read_packed(block, cache.length)
    ]
    return cache.length, cache.committed_bytes, states


def assert_unchanged(cache: SessionCache, snapshot: tuple[int, int, list[torch.Tensor]]) -> None:
    length, committed_bytes, states = take_snapshot(cache)
    assert (length, committed_bytes) == snapshot[:2]
    assert all(map(torch.equal, states, snapshot[2]))


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"hidden_BTH": torch.full((2, 1, HIDDEN), float("nan"))}, ErrorCode.BAD_VALUES),
        ({"hidden_BTH": torch.full((2, 1, HIDDEN), float("inf"))}, ErrorCode.BAD_VALUES),
        ({"hidden_BTH": torch.zeros(2, 0, HIDDEN)}, ErrorCode.BAD_VALUES),
        ({"hidden_BTH": torch.zeros(2, 99, HIDDEN)}, ErrorCode.TOO_LONG),
        ({"position": 6}, ErrorCode.BAD_VALUES),
        ({"row_map": (0, 5)}, ErrorCode.BAD_VALUES),
    ],
)
def test_bad_steps_are_refused_and_disturb_nobody(engine: Engine, changes, code) -> None:
    work, neighbour = make_work(engine, draw_hidden(1, 2, 5)), make_work(engine, draw_hidden(2))
    run(engine, work)
    snapshot = take_snapshot(work.cache)
    bad = replace(work, **{"position": 5, "hidden_BTH": draw_hidden(3, 2, 1), **changes})

    refusal, output = engine.execute([bad, neighbour])

    assert_refused(refusal, code)
    assert_unchanged(work.cache, snapshot)
    assert torch.equal(expect_tensor(output), run(engine, make_work(engine, draw_hidden(2))))
    engine.pool.check_integrity()


class OverflowingBlock:
    """A block whose result is infinite wherever its input is large."""

    is_cut_anywhere = False
    attention_kernels = ()
    linears: ClassVar[Mapping[str, Linear]] = {}

    def __init__(self, block: Block) -> None:
        self.num_bytes = block.num_bytes
        self._block = block

    def __call__(self, hidden_NH: torch.Tensor, batch, ranges) -> torch.Tensor:
        output_NH = self._block(hidden_NH, batch, ranges)
        return output_NH.masked_fill(hidden_NH > 100, float("inf"))


def test_a_result_that_overflows_is_refused_and_not_committed(tiny_models) -> None:
    checkpoint = Checkpoint.open(tiny_models.get().directory)
    spec, span = read_spec(checkpoint.config), Span(0, 1)
    assert isinstance(spec, ModelSpec)
    block = load_block(checkpoint, spec, 0, Numerics(WeightFormat.FP32))
    rotary = [RotaryTable.build(spec.head_dim, spec.max_positions, rope) for rope in spec.ropes]
    pool = KVCachePool(2**20, LazyStore(1, spec.num_kv_heads, spec.head_dim, torch.float32))
    blocks = cast(list[Block], [OverflowingBlock(block)])
    engine = Engine(spec, span, blocks, rotary, pool, Numerics(WeightFormat.FP32))
    work, neighbour = (make_work(engine, draw_hidden(seed, 1, 5), span) for seed in (1, 2))
    run(engine, work)
    snapshot = take_snapshot(work.cache)

    huge = replace(work, position=5, hidden_BTH=draw_hidden(3) * 1000)
    refusal, output = engine.execute([huge, neighbour])

    assert_refused(refusal, ErrorCode.BAD_VALUES)
    assert_unchanged(work.cache, snapshot)
    expected = run(engine, make_work(engine, draw_hidden(2, 1, 5), span))
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    run(engine, replace(work, position=5, hidden_BTH=draw_hidden(3)))
    pool.check_integrity()


def test_full_cache_refuses_one_step_and_computes_the_others(tiny_models) -> None:
    page_bytes = load_engine(tiny_models).pool.token_bytes * 64 * 4
    engine = load_engine(tiny_models, budget=2 * page_bytes)
    fits, too_much = make_work(engine, draw_hidden(1)), make_work(engine, draw_hidden(2, 1, 70))

    output, refusal = engine.execute([fits, too_much])

    assert isinstance(output, torch.Tensor)
    assert isinstance(refusal, CacheFullError)
    assert refusal.retry_after_seconds is not None
    assert too_much.cache.length == 0
    fits.cache.close()
    run(engine, too_much)


def test_two_steps_of_one_session_in_a_batch_are_refused(engine: Engine) -> None:
    work = make_work(engine, draw_hidden(1))

    first, second = engine.execute([work, replace(work, position=1)])

    assert isinstance(first, torch.Tensor)
    assert_refused(second, ErrorCode.INTERNAL)
    assert work.cache.length == 1


def test_a_closed_session_is_refused(engine: Engine) -> None:
    work = make_work(engine, draw_hidden(1))
    work.cache.close()

    assert_refused(engine.execute([work])[0], ErrorCode.UNKNOWN_SESSION)


def test_engine_counts_its_weights(tiny_models) -> None:
    model = tiny_models.get().reference
    num_parameters = sum(p.numel() for p in model.model.layers[1:3].parameters())

    engine = load_engine(tiny_models, span=Span(1, 3))

    assert engine.num_weight_bytes == 4 * num_parameters
    assert "1:3" in repr(engine)


def test_results_require_no_gradients(engine: Engine) -> None:
    hidden = draw_hidden(1).requires_grad_()

    assert not run(engine, make_work(engine, hidden)).requires_grad


@pytest.mark.parametrize("weights", [WeightFormat.INT8, WeightFormat.FP32])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_parts_of_a_prompt_give_what_the_whole_gives(
    tiny_models, weights: WeightFormat, num_rows: int
) -> None:
    engine = load_engine(tiny_models, weights)
    prompt = draw_hidden(1, num_rows, 230)
    expected = run(engine, make_work(engine, prompt, max_tokens=300))
    stride = count_part_tokens(num_rows, engine.part_tokens)

    for sizes in ([stride] * (230 // stride + 1), [3 * stride, stride, 230]):
        work = make_work(engine, prompt, max_tokens=300)
        outputs, first = [], 0
        for size in sizes:
            size = min(size, 230 - first)
            if size:
                outputs.append(run(engine, work.cut(first, size)))
                first += size
        output = torch.cat(outputs, dim=1)
        if weights is WeightFormat.INT8:
            assert torch.equal(output, expected), "integers add up to the same in any company"
        else:
            torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


def test_int8_results_do_not_depend_on_how_a_prompt_was_cut_into_steps(tiny_models) -> None:
    engine = load_engine(tiny_models, WeightFormat.INT8)
    prompt = draw_hidden(1, 1, 130)
    expected = run(engine, make_work(engine, prompt, max_tokens=200))

    first = make_work(engine, prompt[:, :128], max_tokens=200)
    outputs = [run(engine, first)]
    outputs.append(run(engine, replace(first, position=128, hidden_BTH=prompt[:, 128:])))

    assert torch.equal(torch.cat(outputs, dim=1), expected)


@pytest.mark.skipif(
    choose_prompt_instruction_set() is None, reason="prompts attend in torch, part by part"
)
@pytest.mark.parametrize("num_rows", [1, 3])
def test_int8_results_do_not_depend_on_the_size_of_parts(tiny_models, num_rows: int) -> None:
    engine = load_engine(tiny_models, WeightFormat.INT8)
    prompt = draw_hidden(1, num_rows, 130)
    expected = run(engine, make_work(engine, prompt, max_tokens=200))

    work = make_work(engine, prompt, max_tokens=200)
    edges = [0, 1, 2, 7, 71, 130]
    outputs = [run(engine, work.cut(first, stop - first)) for first, stop in pairwise(edges)]

    assert torch.equal(torch.cat(outputs, dim=1), expected)


def test_first_part_reserves_memory_for_the_whole_step(tiny_models) -> None:
    engine = load_engine(tiny_models)
    work = make_work(engine, draw_hidden(1, 1, 500), max_tokens=500)
    pool = engine.pool
    pool.budget_bytes = pool.used_bytes + 3 * PAGE_TOKENS * 4 * pool.token_bytes

    (refusal,) = engine.execute([work.cut(0, 64)])

    assert_refused(refusal, ErrorCode.CACHE_FULL)
    assert work.cache.length == 0
