"""Sessions whose keys and values are kept in int8: their numbers, their room, their opening."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import engine_devices
import pytest
import torch
from allocations import AllocationSizes
from chosen_cases import choose_cases
from engine_devices import execute
from kv_cache_scene import NUM_BLOCKS, NUM_HEADS, SPAN
from service_scene import Peer, draw_hidden, expect_output, make_open, make_step, with_peer
from torch import Tensor

from shoal.kernels.attention.native_attention import choose_prompt_instruction_set
from shoal.kernels.linear.quantize import ON_CPUS, WeightFormat
from shoal.models.checkpoints.checkpoint import Checkpoint
from shoal.peer.engine.blocks import attention_kernels
from shoal.peer.engine.blocks.batch import count_part_tokens
from shoal.peer.engine.cache import kv_memory
from shoal.peer.engine.cache.kv_cache import KVCachePool
from shoal.peer.engine.cache.kv_memory import PAGE_TOKENS
from shoal.peer.engine.cache.lazy_memory import LazyStore
from shoal.peer.engine.engine import Engine
from shoal.peer.engine.loading.engine_loader import load_engine
from shoal.peer.engine.steps import StepWork
from shoal.protocol.errors import CacheFullError
from shoal.protocol.fair_share import Tenant
from shoal.protocol.messages.session import Opened
from shoal.protocol.spans import Span
from shoal.protocol.tensors import KVFormat

WHOLE = Span(0, 4)
VARIANTS = ["llama", "mistral-window", "qwen3", "gemma2", "bloom"]
"""The first three attend in C, where it was built; the others in torch."""


@pytest.fixture(scope="module")
def load(tiny_models: Any) -> Callable[..., Engine]:
    engines: dict[tuple[str, WeightFormat], Engine] = {}

    def load_once(variant: str = "llama", weights: WeightFormat = WeightFormat.INT8) -> Engine:
        if (variant, weights) not in engines:
            checkpoint = Checkpoint.open(tiny_models.get(variant).directory)
            engines[variant, weights] = load_engine(
                checkpoint, WHOLE, weights, kv_budget_bytes=2**26
            )
        return engines[variant, weights]

    return load_once


def open_work(
    engine: Engine, hidden_BTH: Tensor, kv_format: KVFormat = KVFormat.INT8, **options: Any
) -> StepWork:
    """Open a fresh session and return its first step."""
    cache = engine.pool.open(hidden_BTH.shape[0], 200, WHOLE, None, kv_format)
    return StepWork(cache, 0, hidden_BTH, **options)


def execute_cut(engine: Engine, work: StepWork, edges: Sequence[int]) -> Tensor:
    parts = [work.cut(first, stop - first) for first, stop in pairwise(edges)]
    return torch.cat([execute(engine, part)[0] for part in parts], dim=1)


def decode(engine: Engine, work: StepWork, tokens_BTH: Tensor) -> Tensor:
    """Take tokens one by one behind what the session holds."""
    return engine_devices.decode(engine, [work], [tokens_BTH])[0]


# ---- numbers


@pytest.mark.parametrize("weights", ON_CPUS)
@pytest.mark.parametrize("variant", [*VARIANTS, "wrapped-stablelm"])
def test_results_are_near_those_of_a_float_cache(
    load: Any, variant: str, weights: WeightFormat
) -> None:
    if variant.startswith("wrapped") and weights is WeightFormat.INT8:
        pytest.skip("transformers' layers have float weights")
    engine = load(variant, weights)
    prompt, tokens = draw_hidden(1, 2, 90), draw_hidden(2, 2, 10)

    outputs: list[Tensor] = []
    for kv_format in KVFormat:
        work = open_work(engine, prompt, kv_format)
        outputs.append(
            torch.cat([*execute(engine, work), decode(engine, work, tokens)], dim=1).float()
        )

    exact, ours = outputs
    error = (ours - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert 0 < error < 0.03


BOTH_INT8 = (WeightFormat.INT8, KVFormat.INT8)
ONE_INT8 = (WeightFormat.INT8, KVFormat.FLOAT), (WeightFormat.FP32, KVFormat.INT8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "formats"),
    choose_cases(
        [
            *((variant, BOTH_INT8) for variant in (*VARIANTS, "mixtral", "gpt2-unscaled")),
            *(("llama", formats) for formats in ONE_INT8),
            ("wrapped-stablelm", ONE_INT8[1]),
        ],
        [*VARIANTS, "mixtral", "gpt2-unscaled", "wrapped-stablelm", "wrapped-deepseek-v3"],
        [BOTH_INT8, *ONE_INT8],
    ),
)
def test_prompts_and_tokens_do_not_depend_on_company(
    load: Any, variant: str, formats: tuple[WeightFormat, KVFormat]
) -> None:
    """With float32 weights, a cache of floats may differ in its last digits."""
    weights, kv_format = formats
    if variant.startswith("wrapped") and weights is WeightFormat.INT8:
        pytest.skip("transformers' layers have float weights")
    expected, outputs = decode_alone_and_in_company(load(variant, weights), kv_format)

    assert torch.equal(outputs, expected)


def decode_alone_and_in_company(engine: Engine, kv_format: KVFormat) -> tuple[Tensor, Tensor]:
    """Return what a prompt and tokens behind it lead to, alone and beside other sessions."""
    prompt, tokens = draw_hidden(1, 2, 40), draw_hidden(2, 2, 12)
    alone = open_work(engine, prompt, kv_format)
    expected = [*execute(engine, alone), decode(engine, alone, tokens)]

    beside = open_work(engine, prompt, kv_format)
    stride = count_part_tokens(2, engine.part_tokens)
    outputs: list[Tensor] = []
    for first in range(0, 40, stride):  # one part after the other, where alone all came at once
        strangers = [open_work(engine, draw_hidden(seed, 1, 9)) for seed in range(first % 3)]
        outputs.append(execute(engine, *strangers, beside.cut(first, min(stride, 40 - first)))[-1])
    for step, token in enumerate(tokens.split(1, dim=1)):
        work = replace(beside, position=40 + step, hidden_BTH=token, decoded=True)
        strangers = [
            open_work(engine, draw_hidden(step * 10 + seed), decoded=True)
            for seed in range(step % 8)
        ]
        strangers += [open_work(engine, draw_hidden(step, 1, 9), KVFormat.FLOAT)] * (step % 2)
        outputs.append(execute(engine, *strangers, work)[-1])
        for stranger in strangers:
            stranger.cache.close()
    return torch.cat(expected, dim=1), torch.cat(outputs, dim=1)


@pytest.mark.skipif(
    choose_prompt_instruction_set() is None, reason="prompts attend in torch, part by part"
)
@pytest.mark.parametrize("variant", VARIANTS[:3])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_results_do_not_depend_on_how_a_prompt_is_cut(
    load: Any, variant: str, num_rows: int
) -> None:
    engine = load(variant)
    prompt = draw_hidden(1, num_rows, 130)
    expected = execute(engine, open_work(engine, prompt))[0]

    output = execute_cut(engine, open_work(engine, prompt), [0, 1, 2, 7, 71, 130])

    assert torch.equal(output, expected)


@pytest.mark.parametrize("variant", VARIANTS[3:])
def test_parts_of_the_size_of_torch_give_what_the_whole_gives(load: Any, variant: str) -> None:
    engine = load(variant)
    stride = count_part_tokens(1, engine.part_tokens)
    prompt = draw_hidden(1, 1, stride + 30)
    expected = execute(engine, open_work(engine, prompt))[0]

    output = execute_cut(engine, open_work(engine, prompt), [0, stride, stride + 30])

    assert torch.equal(output, expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_replay_of_decoded_tokens_is_exact_with_float32_weights(load: Any, variant: str) -> None:
    """With those in int8: `test_device_engine.py`."""
    engine = load(variant, WeightFormat.FP32)
    prompt, tokens = draw_hidden(1, 3, 120), draw_hidden(2, 3, 30)
    original, replayed = open_work(engine, prompt), open_work(engine, prompt)
    execute(engine, original)
    expected = decode(engine, original, tokens)

    execute(engine, replayed)
    (output,) = execute(engine, replace(replayed, position=120, hidden_BTH=tokens, decoded=True))

    assert torch.equal(output, expected)
    for block in range(WHOLE.start, WHOLE.stop):
        ours, theirs = (work.cache.memory.read_packed(block, 150) for work in (original, replayed))
        for side in range(2):
            assert torch.equal(ours[side][:, :, :150], theirs[side][:, :, :150])


# ---- room


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "weights"),
    [
        ("gemma2", WeightFormat.FP32),
        pytest.param("bloom", WeightFormat.BF16, marks=pytest.mark.thorough),
    ],
)
def test_torch_attends_to_few_heads_at_a_time(
    tiny_models: Any, monkeypatch: pytest.MonkeyPatch, variant: str, weights: WeightFormat
) -> None:
    for name in ("can_attend", "can_attend_prompts"):
        monkeypatch.setattr(attention_kernels, name, lambda shape: False)
    checkpoint = Checkpoint.open(tiny_models.get(variant).directory)
    engine = load_engine(checkpoint, WHOLE, weights, kv_budget_bytes=2**26)
    prompt, tokens = draw_hidden(1, 3, 190), draw_hidden(2, 3, 3)
    head_bytes = 2 * 200 * engine.spec.head_dim * engine.dtype.itemsize

    outputs: list[Tensor] = []
    for num_heads in (1000, 3 * engine.spec.num_kv_heads - 1, 1, 0.5):
        monkeypatch.setattr(kv_memory, "UNPACKED_BYTES", int(num_heads * head_bytes))
        work = open_work(engine, prompt)
        first = execute(engine, work)[0]
        with AllocationSizes() as sizes:
            rest = decode(engine, work, tokens)
        outputs.append(torch.cat([first, rest], dim=1))
        assert (max(sizes.found) <= head_bytes) == (num_heads <= 1)

    for output in outputs[1:]:
        assert torch.equal(output, outputs[0])


def make_pool(budget_bytes: int, head_dim: int, dtype: torch.dtype) -> KVCachePool:
    return KVCachePool(budget_bytes, LazyStore(NUM_BLOCKS, NUM_HEADS, head_dim, dtype))


def count_tokens_that_fit(pool: KVCachePool, kv_format: KVFormat) -> int:
    cache = pool.open(1, 50_000, SPAN, None, kv_format)
    try:
        while True:
            cache.prepare(cache.length, PAGE_TOKENS)
            cache.commit(PAGE_TOKENS)
            pool.check_integrity()
    except CacheFullError:
        return cache.length
    finally:
        cache.close()


@pytest.mark.parametrize(("dtype", "ratio"), [(torch.bfloat16, 1.88), (torch.float32, 3.76)])
def test_so_many_more_tokens_fit_into_the_same_room(dtype: torch.dtype, ratio: float) -> None:
    page_bytes = PAGE_TOKENS * NUM_BLOCKS * 2 * NUM_HEADS * 64 * dtype.itemsize
    pool = make_pool(50 * page_bytes, 64, dtype)

    as_floats = count_tokens_that_fit(pool, KVFormat.FLOAT)
    as_integers = count_tokens_that_fit(pool, KVFormat.INT8)

    assert as_floats == 50 * PAGE_TOKENS
    assert as_integers / as_floats == pytest.approx(ratio, abs=0.03)
    assert pool.used_bytes == 0


def test_free_tokens_are_those_of_the_format() -> None:
    page_bytes = PAGE_TOKENS * NUM_BLOCKS * 2 * NUM_HEADS * 64 * 4
    pool = make_pool(50 * page_bytes, 64, torch.float32)
    tenant = Tenant("home", "one")

    as_floats = pool.count_free_tokens(tenant)
    as_integers = pool.count_free_tokens(tenant, KVFormat.INT8)
    cache = pool.open(1, 10_000, SPAN, tenant, KVFormat.INT8)
    cache.prepare(0, as_integers)

    assert 3.5 * as_floats < as_integers < 4 * as_floats
    with pytest.raises(CacheFullError):
        cache.prepare(0, as_integers + 1)


# ---- opening


@with_peer()
async def test_open_names_the_format_of_the_session(peer: Peer) -> None:
    prompt, token = draw_hidden(1, 1, 70), draw_hidden(2)

    async def ask(peer: Peer, kv_format: KVFormat) -> tuple[int, int, list[Tensor]]:
        number = kv_format + 1
        talk = await peer.greet()
        opened = await talk.ask(make_open(number, kv_format=kv_format))
        assert isinstance(opened, Opened)
        before = await peer.count_used_bytes()
        outputs = [
            expect_output(await talk.ask(make_step(1, 0, prompt, number))),
            expect_output(await talk.ask(make_step(2, 70, token, number, is_decoded=True))),
        ]
        return opened.free_kv_tokens, await peer.count_used_bytes() - before, outputs

    free, num_bytes, exact = await ask(peer, KVFormat.FLOAT)
    free_int8, num_bytes_int8, ours = await ask(peer, KVFormat.INT8)

    assert free_int8 > 1.5 * free
    assert num_bytes_int8 < 0.4 * num_bytes
    for output, wanted in zip(ours, exact, strict=True):
        assert not torch.equal(output, wanted)
        torch.testing.assert_close(output, wanted, rtol=0.05, atol=0.05)
