"""Runs whose parts are audited: replicas that compute something else are found and put aside."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from run_swarm import RunSwarm, make_identity, run_in_swarm
from training_runs import open_run, train_alone

from shoal.protocol.runs.training_run import Mode, PartId, TrainingRun

NUM_UPDATES = 3


def break_passes(swarm: RunSwarm, host: str, num_passes: int, *names: str) -> None:
    """Have a host compute passes of update 1 from zeros in place of what comes to it."""
    passes = iter(range(num_passes))

    def fault(function: Any) -> Any:
        compute, (part, payload, *others) = function.func, function.args
        is_meant = part.update == 1 and compute.__name__ in (names or ("run_loss", "run_audit"))
        if not is_meant or next(passes, None) is None:
            return function
        return partial(compute, part, bytes(len(payload)), *others)

    swarm.faults[host] = fault


def run_audited(
    run: TrainingRun,
    folder: Path,
    num_peers: int,
    prepare: Callable[[RunSwarm], None],
    check: Callable[[RunSwarm], None],
) -> str:
    """Audit all parts of a run; return the digest of its weights."""

    async def scene(swarm: RunSwarm) -> str:
        await swarm.wait_for_update(NUM_UPDATES)
        check(swarm)
        return await swarm.finish()

    def begin(swarm: RunSwarm) -> None:
        swarm.audited_fraction = 1.0
        prepare(swarm)

    return run_in_swarm(run, folder, scene, num_peers=num_peers, prepare=begin)


def list_aside(swarm: RunSwarm) -> list[tuple[object, str]]:
    facts = [event.facts for _, event in swarm.events if event.name == "put_aside"]
    return [(one["peer"], str(one["why"])) for one in facts]


@pytest.mark.parametrize(("mode", "num_stages"), [("exact", 3), ("int8", 2)])
def test_audits_change_nothing_and_accuse_nobody(folder: Path, mode: Mode, num_stages: int) -> None:
    borders = list(range(1, num_stages))
    run, shards = open_run(folder, num_updates=NUM_UPDATES, mode=mode, stage_borders=borders)
    num_peers = 2 * num_stages
    audited = set[object]()

    def prepare(swarm: RunSwarm) -> None:
        for number in range(num_peers):
            swarm.faults[f"peer{number}"] = note

    def note(function: Any) -> Any:
        if function.func.__name__ == "run_audit":
            audited.add((function.func.__self__.stage, function.args[0]))
        return function

    def check(swarm: RunSwarm) -> None:
        assert not list_aside(swarm)
        last = [PartId(NUM_UPDATES - 1, index) for index in range(run.parts_per_update)]
        assert audited.issuperset(product(range(num_stages), last))
        assert set(swarm.counted.values()) == {1}

    # It ends by comparing the digests of replicas; int8 rounds other sums than one process does.
    ended = run_audited(run, folder, num_peers, prepare, check)
    assert mode == "int8" or ended == train_alone(run, shards)


@pytest.mark.parametrize(
    ("num_peers", "host", "num_passes"),
    [(6, "peer1", 1000), (4, "peer3", 1), (4, "peer1", 1)],
)
def test_replica_that_computes_wrongly_is_put_aside_and_its_parts_are_computed_again(
    run: TrainingRun, folder: Path, quiet_digest: str, num_peers: int, host: str, num_passes: int
) -> None:
    def check(swarm: RunSwarm) -> None:
        ((peer, why),) = list_aside(swarm)
        assert peer == make_identity(host).peer_id
        assert "the gradients of part" in why
        assert ("peer0", "begun_again") in [(name, event.name) for name, event in swarm.events]
        redone = sum(
            int(str(event.facts["parts_redone"]))
            for name, event in swarm.events
            if name == "peer0" and event.name == "update"
        )
        assert redone > 0
        assert sum(swarm.counted.values()) == 2 * run.parts_per_update * NUM_UPDATES + redone

    ended = run_audited(
        run, folder, num_peers, lambda swarm: break_passes(swarm, host, num_passes), check
    )
    assert ended == quiet_digest


@pytest.mark.parametrize("host", ["peer1", "peer3"])
def test_update_counts_as_it_is_where_nothing_shows_which_of_two_replicas_is_right(
    run: TrainingRun, folder: Path, quiet_digest: str, host: str
) -> None:
    def check(swarm: RunSwarm) -> None:
        assert not list_aside(swarm)
        found = [event.facts for _, event in swarm.events if event.name == "replicas_differ"]
        whys = [str(facts["why"]) for facts in found]
        ended = [why for why in whys if why.endswith("the update counts as it is")]
        assert len(ended) == run.parts_per_update
        assert len(whys) == 2 * len(ended)

    def prepare(swarm: RunSwarm) -> None:
        break_passes(swarm, host, 1000)

    assert run_audited(run, folder, 4, prepare, check) != quiet_digest


def test_update_begins_again_when_who_has_counted_a_disputed_part_goes(
    run: TrainingRun, folder: Path, quiet_digest: str
) -> None:
    def check(swarm: RunSwarm) -> None:
        assert "peer1" not in swarm.peers
        assert not list_aside(swarm)

    def prepare(swarm: RunSwarm) -> None:
        break_passes(swarm, "peer1", 1000)
        compute, counted = swarm.faults["peer1"], set[PartId]()

        def fault(function: Any) -> Any:
            part, name = function.args[0], function.func.__name__
            if part.update == 1 and name == "run_loss":
                counted.add(part)
            if name == "run_audit" and part in counted:
                swarm.kill_soon("peer1")
            return compute(function)

        swarm.faults["peer1"] = fault

    assert run_audited(run, folder, 4, prepare, check) == quiet_digest


def test_fault_of_an_audit_alone_puts_nobody_aside(
    run: TrainingRun, folder: Path, quiet_digest: str
) -> None:
    def check(swarm: RunSwarm) -> None:
        assert not list_aside(swarm)

    def prepare(swarm: RunSwarm) -> None:
        break_passes(swarm, "peer1", 1, "run_audit")

    assert run_audited(run, folder, 4, prepare, check) == quiet_digest
