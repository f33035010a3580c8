"""Runs in int8 mode: replicas stay equal bit for bit, with fewer bytes on the wire."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from run_swarm import RunSwarm, nothing, run_in_swarm
from training_runs import open_run

from shoal.peer.engine.training.trainable_span import TrainableSpan
from shoal.peer.runs.gradient_vectors import Int8Vector, find_slice
from shoal.protocol.messages.fields import Message
from shoal.protocol.messages.runs import PartPass, PartPassed, SumFetch, Sums
from shoal.protocol.runs.training_run import Mode, PartId, TrainingRun
from shoal.protocol.spans import Span

NUM_UPDATES = 4


def train(
    run: TrainingRun,
    folder: Path,
    num_peers: int,
    scene: Callable[[RunSwarm], Awaitable[object]] = nothing,
) -> RunSwarm:
    """Train with peers of stage 0 and 1 in turn; return the swarm, whose peers have ended."""

    async def finish(swarm: RunSwarm) -> RunSwarm:
        await scene(swarm)
        await swarm.finish()
        return swarm

    return run_in_swarm(run, folder, finish, num_peers=num_peers)


def open_mode(folder: Path, mode: Mode) -> TrainingRun:
    return open_run(folder, num_updates=NUM_UPDATES, mode=mode)[0]


class Traffic:
    """Counts the bytes behind the messages that go to and from peers."""

    def __init__(self) -> None:
        self.part_sizes = set[int]()
        self.num_summed = 0
        self.sum_bytes = 0

    def note(self, message: Message) -> bool:
        match message:
            case PartPass() | PartPassed() if message.num_bytes:
                self.part_sizes.add(message.num_bytes)
            case SumFetch():
                self.num_summed += message.stop - message.start
            case Sums():
                self.sum_bytes += message.num_bytes
            case _:
                pass
        return False

    async def watch(self, swarm: RunSwarm) -> None:
        for is_sent in (False, True):
            swarm.do_at(self.note, lambda _: None, is_sent=is_sent)


def list_losses(swarm: RunSwarm) -> list[float]:
    """Return the losses of all updates."""
    losses = {
        event.facts["update"]: float(str(event.facts["loss"]))
        for _, event in swarm.events
        if event.name == "update" and event.facts["update"]
    }
    return list(losses.values())


def check_replicas(swarm: RunSwarm) -> None:
    """Check that all replicas of a stage were equal before and after each update."""
    assert {update for update, _ in swarm.digests} == set(range(NUM_UPDATES + 1))
    assert all(len(digests) == 1 for digests in swarm.digests.values())


def test_int8_takes_a_quarter_of_the_bytes_and_comes_to_the_same_losses(folder: Path) -> None:
    exact, int8 = Traffic(), Traffic()

    exact_losses = list_losses(train(open_mode(folder, "exact"), folder, 4, exact.watch))
    swarm = train(open_mode(folder, "int8"), folder, 4, int8.watch)

    check_replicas(swarm)
    tokens = 2 * 16
    assert exact.part_sizes == {4 * 32 * tokens}
    assert int8.part_sizes == {(32 + 2) * tokens}  # width 32 is one group, with a scale of 2 bytes
    assert exact.sum_bytes == 6 * exact.num_summed > 0  # 8 to the members that sum, 4 from there
    assert 0 < int8.sum_bytes < 1.04 * int8.num_summed
    # Rounding adds errors of about 1 % to a gradient, so it is to change less than an update does.
    int8_losses = list_losses(swarm)
    changes = [abs(one - other) for one, other in pairwise(exact_losses)]
    differences = [abs(one - other) for one, other in zip(exact_losses, int8_losses, strict=True)]
    assert max(differences) < min(changes)


def test_replicas_stay_equal_while_one_is_killed_in_the_all_gather(folder: Path) -> None:
    killed: list[str] = []

    async def scene(swarm: RunSwarm) -> None:
        def kill(host: str) -> None:
            killed.append(host)
            swarm.kill_soon(host)

        await swarm.wait_for_update(1)
        swarm.do_at(is_reduced_fetch, kill)
        await swarm.wait_until(lambda: bool(killed))
        await swarm.start("newcomer", int(killed[0][-1]) % 2)

    check_replicas(train(open_mode(folder, "int8"), folder, 6, scene))
    assert killed


def is_reduced_fetch(message: Message) -> bool:
    return isinstance(message, SumFetch) and message.is_reduced


@pytest.mark.parametrize("num_members", [1, 2, 3])
def test_members_take_the_same_sum_and_keep_what_rounding_left_out(
    folder: Path, num_members: int
) -> None:
    run, shards = open_run(folder, stage_borders=[])
    spans = [TrainableSpan(run, Span(0, 4)) for _ in range(num_members)]
    for index in range(run.parts_per_update):
        part = PartId(0, index)
        spans[index % num_members].run_loss(part, *shards.read_part(run, part))
    names, members = list(spans[0].sums), [str(number) for number in range(num_members)]
    size = sum(total.units.numel() for total in spans[0].sums.values())
    slices = [find_slice(members, member, size) for member in members]
    before = 1e-3 * torch.randn(size, generator=torch.Generator().manual_seed(1))
    vectors = [
        Int8Vector(span.sums, names, before, [one for one in slices if one != own], math.inf)
        for span, own in zip(spans, slices, strict=True)
    ]
    residuals = [vector.residual for vector in vectors if vector.residual is not None]
    sent = [residual.clone() for residual in residuals]

    for vector, own in zip(vectors, slices, strict=True):
        for mate in vectors:
            if mate is not vector:
                vector.add(*own, mate.read(*own, False))
        vector.finish(*own)
    for vector in vectors:
        for mate, theirs in zip(vectors, slices, strict=True):
            if mate is not vector:
                vector.load(*theirs, mate.read(*theirs, True))

    total = vectors[0].numbers
    assert all(torch.equal(vector.numbers, total) for vector in vectors)
    own_sums = [torch.cat([span.sums[name].read().flatten() for name in names]) for span in spans]
    expected = torch.stack(own_sums).sum(0) + num_members * before
    left_out = torch.stack(residuals).sum(0)
    assert torch.allclose(total + left_out, expected, rtol=0, atol=1e-6)
    assert bool((left_out != 0).any()) == (num_members > 1)
    # Each number is rounded once by each sender and once by who sums: to half a step, and what
    # rounding the scale to 8 bits adds to the largest integer.
    steps = max(float((one.abs()).max()) for one in (*own_sums, expected)) / 127
    assert all(float(one.abs().max()) <= (0.5 + 0.26) * steps for one in sent)
    assert float(left_out.abs().max()) <= num_members * (0.5 + 0.26) * 1.1 * steps
