"""Members that sum gradients which no honest member has are refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from run_swarm import RunSwarm, make_identity, run_in_swarm
from training_runs import open_run, train_alone

from shoal.kernels.wire_tensors import encode_int8
from shoal.peer.engine.training.trainable_span import TrainableSpan
from shoal.protocol.messages.fields import Message
from shoal.protocol.messages.runs import RunPiece, Sums
from shoal.protocol.runs.training_run import Mode, PartId
from shoal.protocol.spans import Span

NUM_UPDATES = 4


def multiply(data: bytes | memoryview, mode: Mode, factor: float) -> bytes:
    """Return the bytes of gradients that are so many times as large."""
    if mode == "exact":
        return (np.frombuffer(data, dtype="<f8") * factor).astype("<f8").tobytes()
    size = len(data)
    return encode_int8(torch.full((1, 4 * size), factor)).ljust(size, b"\0")[:size]


def make_liar(mode: Mode, factor: float) -> Callable[[Message], Message]:
    """Return what becomes of the messages of a member that multiplies its sums."""
    lying = set[object]()

    def falsify(message: Message) -> Message:
        if isinstance(message, Sums):
            lying.add(message.question)
        if not isinstance(message, RunPiece) or message.question not in lying:
            return message
        data = multiply(message.tensor.data, mode, factor)
        return replace(message, tensor=replace(message.tensor, data=data))

    return falsify


@pytest.mark.parametrize(
    ("mode", "factor"), [("exact", 1000.0), ("exact", math.nan), ("int8", 1000.0)]
)
def test_gradients_that_are_too_large_are_refused_by_name_and_computed_again(
    tmp_path: Path, mode: Mode, factor: float
) -> None:
    run, shards = open_run(tmp_path, num_updates=NUM_UPDATES, mode=mode)

    async def scene(swarm: RunSwarm) -> str:
        await swarm.wait_for_update(1)
        swarm.falsify["peer3"] = make_liar(mode, factor)
        await swarm.wait_for_update(NUM_UPDATES)
        aside = [event.facts for _, event in swarm.events if event.name == "put_aside"]
        assert {str(one["peer"]) for one in aside} == {make_identity("peer3").peer_id}
        assert "it sent numbers that are no gradients" in str(aside[0]["why"])
        told = [e.facts for host, e in swarm.events if host == "peer0" and e.name == "update"]
        redone = sum(int(str(one["parts_redone"])) for one in told)
        assert redone > 0
        assert sum(swarm.counted.values()) == 2 * run.parts_per_update * NUM_UPDATES + redone
        del swarm.falsify["peer3"]
        return await swarm.finish()

    digest = run_in_swarm(run, tmp_path, scene)
    assert mode == "int8" or digest == train_alone(run, shards)


def test_gradient_of_a_part_is_shortened_to_what_is_usual_and_taken_out_again(
    tmp_path: Path,
) -> None:
    run, shards = open_run(tmp_path)
    span = TrainableSpan(run, Span(0, 4))

    def count(part: PartId) -> float:
        span.run_loss(part, *shards.read_part(run, part))
        return math.sqrt(span.measure_squared_norm(span.read_gradients()))

    norm = count(PartId(0, 0))
    usual_norm = norm / 1000
    squared_norm = run.parts_per_update * usual_norm**2
    span.apply_update(span.read_gradients(), squared_norm)

    assert count(PartId(1, 0)) == pytest.approx(10 * usual_norm, rel=1e-3)
    span.discount(PartId(1, 0), *shards.read_part(run, PartId(1, 0)))
    assert not any(total.units.any() for total in span.sums.values())
    assert span.most_sum_norm == pytest.approx(11 * usual_norm * run.parts_per_update)


def test_norm_of_the_last_gradient_is_part_of_the_state(tmp_path: Path) -> None:
    run, shards = open_run(tmp_path)
    span, other = TrainableSpan(run, Span(0, 4)), TrainableSpan(run, Span(0, 4))
    span.run_loss(PartId(0, 0), *shards.read_part(run, PartId(0, 0)))
    assert span.most_sum_norm == math.inf
    span.apply_update(span.read_gradients(), 2.25)

    other.load_state(span.read_state())

    assert other.squared_norm == 2.25
    assert other.compute_digest() == span.compute_digest()
    assert other.most_sum_norm == span.most_sum_norm < math.inf
