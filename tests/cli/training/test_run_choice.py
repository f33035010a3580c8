"""The run that `shoal train` takes part in: one of a run file, or one that the swarm has."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from run_swarm import OWNER, RunSwarm, make_identity
from training_runs import open_run
from virtual_time import VirtualClock, run_virtual

from shoal.cli.main import main
from shoal.cli.training.run_choice import choose_record, make_config, wait_for_record
from shoal.cli.training.run_weights import visit_swarm
from shoal.peer.engine.training.run_plan import plan_run
from shoal.peer.hosting import hosted_model
from shoal.peer.process.config import PeerEvent
from shoal.protocol.errors import UsageError
from shoal.protocol.identity import Identity
from shoal.protocol.net.run_search import search_runs
from shoal.protocol.runs.run_record import RunRecord, sign_run
from shoal.protocol.runs.training_run import TrainingRun

JOIN = ("--initial-peers", "/ip4/127.0.0.1/tcp/1/p2p/" + make_identity("peer").peer_id)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("stories", *JOIN), "give --corpus FOLDER"),
        (("stories", "--new-swarm"), "cannot read stories: No such file"),
        (("Stories.toml", *JOIN), "cannot read Stories.toml: No such file"),
        (("stories", *JOIN, "--admit", "somebody"), "--admit: who may take part is said where"),
    ],
)
def test_options_that_do_not_fit_are_told_before_joining(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], complaint: str
) -> None:
    assert main(["train", *arguments]) == 2

    assert complaint in capsys.readouterr().err


def make_options(**changed: object) -> argparse.Namespace:
    options = {"run_file": Path("test"), "new_swarm": False, "new_run": False, "admit": []}
    return argparse.Namespace(**options | changed)


async def choose(
    swarm: RunSwarm, own: TrainingRun | None, identity: Identity = OWNER, **changed: object
) -> RunRecord | None:
    """Choose the run of a peer with these options."""
    search = partial(search_runs, network=swarm.make_network("newcomer"), clock=VirtualClock())
    return await choose_record(make_options(**changed), own, identity, search)


def in_swarm(folder: Path, scene: Callable[[RunSwarm], Awaitable[None]]) -> None:
    """Let something happen in a swarm with one peer, which has begun the run."""

    async def main() -> None:
        swarm = RunSwarm(open_run(folder)[0], folder)
        try:
            await swarm.start("peer0", 0, founds_run=True)
            await scene(swarm)
        finally:
            await swarm.close()

    run_virtual(main())


def test_run_of_the_swarm_has_to_be_that_of_the_run_file(tmp_path: Path) -> None:
    other = open_run(tmp_path, seed=8, num_updates=5)[0]

    async def scene(swarm: RunSwarm) -> None:
        assert await choose(swarm, None) == await choose(swarm, swarm.run) == swarm.record
        with pytest.raises(UsageError, match="differs from test in seed, num_updates: its id is"):
            await choose(swarm, other)

    in_swarm(tmp_path, scene)


def test_other_run_of_the_name_is_passed_over_with_a_run_file(tmp_path: Path) -> None:
    squatted = sign_run(make_identity("squatter"), open_run(tmp_path, seed=8)[0])

    async def scene(swarm: RunSwarm) -> None:
        await swarm.start("squatter", 0, founds_run=True, record=squatted)
        assert await choose(swarm, swarm.run) == swarm.record
        with pytest.raises(UsageError, match="this swarm has 2 runs called test: "):
            await choose(swarm, None)

    in_swarm(tmp_path, scene)


def test_run_begins_once_in_a_swarm(tmp_path: Path) -> None:
    friend = make_identity("friend").peer_id

    async def scene(swarm: RunSwarm) -> None:
        with pytest.raises(UsageError, match="test is under way already: leave out --new-run"):
            await choose(swarm, swarm.run, new_run=True)
        record = await choose(swarm, swarm.run, new_run=True, admit=[friend])
        assert record is not None
        assert (record.owner, record.admitted) == (OWNER.peer_id, (friend,))

    in_swarm(tmp_path, scene)


def test_run_is_waited_for_and_that_is_told_once(tmp_path: Path) -> None:
    events: list[PeerEvent] = []

    async def main() -> None:
        swarm = RunSwarm(open_run(tmp_path)[0], tmp_path)
        clock = VirtualClock()
        async with visit_swarm(swarm.make_network("newcomer"), OWNER) as presence:
            waiting = asyncio.create_task(
                wait_for_record(make_options(), None, presence, clock, events.append)
            )
            await asyncio.sleep(60.0)
            assert not waiting.done()
            await swarm.start("peer0", 0, founds_run=True)
            assert await waiting == swarm.record
            await swarm.close()

    run_virtual(main())

    what = "a peer that shows the run test; `shoal monitor --once` lists those there are"
    assert events == [PeerEvent("waiting_for", {"what": what})]


@pytest.mark.parametrize("is_beside", [False, True])
def test_memory_of_graphs_is_what_this_machine_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_beside: bool
) -> None:
    record = sign_run(OWNER, open_run(tmp_path)[0])
    options = argparse.Namespace(
        run_file=tmp_path / "run.toml", corpus=None, stage=None, json=True, new_swarm=True,
        new_run=False, run_threads=torch.get_num_threads(), announce_period=30.0, silence=10.0,
        linger=10.0,
    )  # fmt: skip
    stages = plan_run(record.run).stages
    largest = max(stage.memory_bytes for stage in stages)
    useful = max(stage.graph_bytes for stage in stages)
    monkeypatch.setattr(hosted_model, "read_free_bytes", lambda: largest + useful)

    config = make_config(options, record, is_beside=is_beside)

    assert config.graph_bytes == useful // 2
    assert config.stages == [0, 1]
