"""Sessions of several clients in any mix on one compute thread: each as if it were alone.

What everybody does is drawn by lot: prompts, single tokens, rollbacks, moved rows, forks, and steps
that are given up half way. The oracle is the same engine with one session at a time.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import pytest
import torch
from compute_thread_scene import on_loop
from torch import Tensor

from shoal.kernels.linear.quantize import WeightFormat
from shoal.models.checkpoints.checkpoint import Checkpoint
from shoal.peer.engine.cache.kv_cache import SessionCache
from shoal.peer.engine.compute_thread import ComputeThread
from shoal.peer.engine.engine import Engine
from shoal.peer.engine.loading.engine_loader import load_engine
from shoal.peer.engine.steps import StepWork
from shoal.protocol.fair_share import Tenant
from shoal.protocol.spans import Span
from shoal.protocol.tensors import KVFormat

HIDDEN, VOCABULARY = 64, 128
MAX_TOKENS = 400
SPANS = (Span(0, 4), Span(0, 4), Span(1, 3), Span(0, 2))
NUM_STORIES, NUM_DEEDS = 8, 14


@dataclass(frozen=True, eq=False)
class Deed:
    """A step, and whether it is given up so many turns of the loop after it was asked for."""

    position: int
    hidden_BTH: Tensor
    row_map: tuple[int, ...] | None = None
    given_up_after: int | None = None


@dataclass
class Story:
    """What one session goes through; a fork begins with the first deeds of its parent."""

    client: str
    span: Span
    num_rows: int
    kv_format: KVFormat
    deeds: list[Deed] = field(default_factory=list)
    forked_after: int | None = None
    """Behind which of its deeds somebody else goes on from where it is."""

    @property
    def lasting(self) -> list[Deed]:
        return [deed for deed in self.deeds if deed.given_up_after is None]


def tell_story(dice: random.Random, kv_format: KVFormat) -> Story:
    """Draw a story. Whatever is asked for is within what the session has by then."""
    story = Story(
        f"client {dice.randrange(3)}", dice.choice(SPANS), dice.choice([1, 1, 2, 3]), kv_format
    )
    generator = torch.Generator().manual_seed(dice.randrange(2**31))
    length = 0
    for number in range(NUM_DEEDS):
        position = dice.randint(length // 2, length) if dice.random() < 0.15 else length
        is_prompt = number == 0 or dice.random() < 0.25
        num_tokens = dice.randint(2, 100) if is_prompt else 1
        if position + num_tokens > MAX_TOKENS:
            break
        is_moved = length > 0 and story.num_rows > 1 and dice.random() < 0.2
        given_up_after = dice.randint(0, 6) if dice.random() < 0.2 else None
        if given_up_after is not None:
            position, is_moved = length, False  # nothing that lasts is changed by it
        rows = tuple(dice.randrange(story.num_rows) for _ in range(story.num_rows))
        hidden = torch.randn(story.num_rows, num_tokens, HIDDEN, generator=generator)
        story.deeds.append(Deed(position, hidden, rows if is_moved else None, given_up_after))
        if given_up_after is None:
            length = position + num_tokens
    if dice.random() < 0.5:
        story.forked_after = dice.randint(1, len(story.lasting))
    return story


def make_work(story: Story, session: SessionCache, deed: Deed) -> StepWork:
    is_decoded = deed.hidden_BTH.shape[1] == 1
    return StepWork(session, deed.position, deed.hidden_BTH, deed.row_map, decoded=is_decoded)


def open_session(engine: Engine, story: Story) -> SessionCache:
    tenant = Tenant("home", story.client)
    return engine.pool.open(story.num_rows, MAX_TOKENS, story.span, tenant, story.kv_format)


def compute_alone(engine: Engine, story: Story) -> list[Tensor]:
    """The oracle: nobody else is there, and nothing is given up."""
    session = open_session(engine, story)
    outputs: list[Tensor] = []
    for deed in story.lasting:
        (output,) = engine.execute([make_work(story, session, deed)])
        assert isinstance(output, Tensor), output
        outputs.append(output)
    session.close()
    return outputs


async def live(
    compute: ComputeThread, engine: Engine, story: Story, session: SessionCache, deeds: list[Deed]
) -> list[Tensor]:
    """Go through deeds of a session as its client does; return the outputs of those that last."""
    outputs: list[Tensor] = []
    for deed in deeds:
        step = compute.submit(make_work(story, session, deed), ("home", story.client))
        if deed.given_up_after is None:
            outputs.append((await step).hidden_BTH)
            continue
        for _ in range(deed.given_up_after):
            await asyncio.sleep(0)
        step.cancel()
    return outputs


async def live_with_fork(
    compute: ComputeThread, engine: Engine, story: Story
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the outputs of a session, and those of its fork, which does what is left as well."""
    session = await compute.call(lambda: open_session(engine, story))
    num_before = story.forked_after if story.forked_after is not None else len(story.lasting)
    mark = 0 if num_before == 0 else story.deeds.index(story.lasting[num_before - 1]) + 1
    outputs = await live(compute, engine, story, session, story.deeds[:mark])
    length = 0
    for deed in story.lasting[:num_before]:
        length = deed.position + deed.hidden_BTH.shape[1]

    def fork() -> SessionCache:
        twin = open_session(engine, story)
        copy = twin.begin_with(session, length)
        while not copy.advance():
            pass
        return twin

    twins = [session] if story.forked_after is None else [session, await compute.call(fork)]
    rest = await asyncio.gather(
        *(live(compute, engine, story, twin, story.deeds[mark:]) for twin in twins)
    )
    for twin in twins:
        await compute.call(twin.close)
    return outputs + rest[0], outputs + rest[-1]


@cache
def draw_head() -> Tensor:
    return torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(0))


def assert_last_digits(ours: Tensor, alone: Tensor) -> None:
    """The words are the same, and the numbers but for their last digits."""
    torch.testing.assert_close(ours, alone, rtol=1e-4, atol=1e-4)
    assert torch.equal((ours @ draw_head().T).argmax(-1), (alone @ draw_head().T).argmax(-1))


def assert_bits(ours: Tensor, alone: Tensor) -> None:
    assert torch.equal(ours, alone)


@pytest.fixture(scope="module")
def load(tiny_models: Any) -> Callable[[str, WeightFormat], Engine]:
    @cache
    def load_once(variant: str, weights: WeightFormat) -> Engine:
        checkpoint = Checkpoint.open(tiny_models.get(variant).directory)
        return load_engine(checkpoint, Span(0, 4), weights, kv_budget_bytes=2**26)

    return load_once


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(1, 10))]
)
@pytest.mark.parametrize(
    ("variant", "weights", "formats", "check"),
    [
        ("llama", WeightFormat.INT8, [*KVFormat], assert_bits),
        ("mixtral", WeightFormat.INT8, [*KVFormat], assert_bits),
        ("gemma2", WeightFormat.INT8, [*KVFormat], assert_bits),
        ("llama", WeightFormat.FP32, [KVFormat.INT8], assert_bits),
        ("llama", WeightFormat.FP32, [KVFormat.FLOAT], assert_last_digits),
    ],
    ids=["int8", "int8 experts", "int8 in torch", "fp32 over integers", "fp32"],
)
@on_loop()
async def test_every_session_computes_what_it_does_alone(
    load: Any, variant: str, weights: WeightFormat, formats: list[KVFormat], check: Any, seed: int
) -> None:
    print("seed", seed)
    engine = load(variant, weights)
    dice = random.Random(seed)
    stories = [tell_story(dice, dice.choice(formats)) for _ in range(NUM_STORIES)]

    async with ComputeThread(engine, token_budget=64) as compute:
        expected = [await compute.call(partial(compute_alone, engine, s)) for s in stories]
        lived = await asyncio.gather(*(live_with_fork(compute, engine, story) for story in stories))
        await compute.call(engine.pool.check_integrity)
    for outputs, alone in zip(lived, expected, strict=True):
        for one in outputs:
            assert len(one) == len(alone)
            for output, right in zip(one, alone, strict=True):
                check(output, right)

    assert engine.pool.used_bytes == 0
