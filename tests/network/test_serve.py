"""`shoal serve` as a process: how it begins, how it leaves, and what it says when it cannot."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import warm_python
from directory_processes import read_announcements
from processes import children_of, stop, wait_until_dead
from prometheus_client.parser import text_string_to_metric_families

from shoal.cli.terminal.interrupts import INTERRUPTED_FACTS
from shoal.peer.local_swarm.swarm import LocalSwarm, PeerProcessError
from shoal.protocol.errors import UsageError
from shoal.protocol.records.announcements import PeerState

UNKNOWN_PEER = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"

pytestmark = [pytest.mark.network, pytest.mark.slow]


@pytest.fixture(scope="module")
def swarm(tiny_models: Any) -> Iterator[LocalSwarm]:
    with LocalSwarm(tiny_models.get().directory, spans=[(0, 2)], weights="fp32") as swarm:
        yield swarm


def run_shoal(
    *arguments: str,
    program: Sequence[str] = ("-m", "shoal.cli"),
    run: Callable[..., Any] = warm_python.run,
) -> tuple[int, str]:
    """Run a command that should end by itself; return its exit code and stderr."""
    done = run(
        [sys.executable, "-P", *program, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )
    return done.returncode, done.stderr


def test_peer_whose_terminal_is_closed_says_goodbye_and_leaves_no_process(
    swarm: LocalSwarm,
) -> None:
    peer = swarm.add((2, 4), options=("--name", "the attic", "--metrics", "0"))
    children = children_of(peer.pid)
    assert children, "the peer has a p2pd"
    with urllib.request.urlopen(peer.facts["url"], timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))

    os.kill(peer.pid, signal.SIGHUP)

    assert peer.wait(60) == 0
    wait_until_dead(children)
    known = asyncio.run(read_announcements(swarm))
    assert known[peer.peer_id].state is PeerState.OFFLINE
    assert known[swarm.peers[0].peer_id].state is PeerState.ONLINE
    assert known[peer.peer_id].kernels == peer.facts["kernels"] != ""
    assert known[peer.peer_id].name == "the attic"
    assert known[peer.peer_id].device.startswith("cpu, ")
    assert known[peer.peer_id].block_bytes > 0
    (blocks,) = (family for family in families if family.name == "shoal_peer_blocks")
    assert [sample.value for sample in blocks.samples] == [2]


def test_peer_that_is_stopped_before_it_says_it_is_online_says_goodbye(swarm: LocalSwarm) -> None:
    program = (str(Path(__file__).with_name("hesitating_peer.py")),)
    peer = swarm.add((2, 4), wait=False, program=program)

    with pytest.raises(PeerProcessError, match="ended before it was online"):
        swarm.wait_until_online([peer])

    known = asyncio.run(read_announcements(swarm))
    assert known[peer.peer_id].state is PeerState.OFFLINE


@pytest.mark.usefixtures("plain_peers")
def test_interrupt_from_a_terminal_spares_p2pd_and_is_quiet(swarm: LocalSwarm) -> None:
    """Ctrl-C goes to the whole process group that owns the terminal.

    A plain process also shows that the end of an interpreter is quiet.
    """
    peer = swarm.add((2, 4))
    (p2pd,) = children_of(peer.pid)
    assert os.getpgid(peer.pid) == peer.pid
    assert os.getpgid(p2pd) == p2pd

    os.killpg(peer.pid, signal.SIGINT)

    assert peer.wait(60) == 0
    assert peer.log() == "it said nothing"
    wait_until_dead([p2pd])


def test_peer_says_when_the_directory_is_lost_and_when_it_is_back(swarm: LocalSwarm) -> None:
    peer = swarm.add((2, 4))
    (p2pd,) = children_of(peer.pid)

    os.kill(p2pd, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while "The directory is back." not in peer.log():
        assert time.monotonic() < deadline, peer.log()
        time.sleep(0.05)  # there is nothing to wait on: a file grows

    lost, back = peer.log().splitlines()
    assert lost.endswith("The directory is lost: p2pd has ended and is started again.")
    assert back.endswith("The directory is back.")
    peer.terminate()
    assert peer.wait(60) == 0


def test_peer_that_is_ended_together_with_its_p2pd_is_quiet(swarm: LocalSwarm) -> None:
    """As systemd ends a service."""
    peer = swarm.add((2, 4))
    (p2pd,) = children_of(peer.pid)

    os.kill(p2pd, signal.SIGTERM)
    peer.terminate()

    assert peer.wait(60) == 0
    assert peer.log() == "it said nothing"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_of_the_start_is_told_from_a_peer_that_served(
    tiny_models: Any, number: signal.Signals
) -> None:
    command = ["serve", str(tiny_models.get().directory), "--new-swarm", "--json"]
    with warm_python.Popen(
        [sys.executable, "-P", "-m", "shoal.cli", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert json.loads(process.stdout.readline())["event"] == "started"
        process.send_signal(number)

        assert process.wait(60) == 130
        assert process.stderr.read() == ""
        assert process.stdout.read().splitlines()[-1] == INTERRUPTED_FACTS


def test_peer_that_is_stopped_while_it_starts_says_so(tiny_models: Any) -> None:
    command = ["serve", str(tiny_models.get().directory), "--new-swarm"]
    with warm_python.Popen(
        [sys.executable, "-P", "-m", "shoal.cli", *command],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("Peer ")
        process.send_signal(signal.SIGTERM)

        assert process.wait(60) == 130
        assert process.stdout.read().splitlines()[-1] == "Stopped before this peer was online."


def test_p2pd_that_stands_still_ends_with_its_peer(swarm: LocalSwarm) -> None:
    peer = swarm.add((2, 4))
    (p2pd,) = children_of(peer.pid)
    stop(p2pd)

    peer.kill()

    wait_until_dead([p2pd])


def test_peer_ends_with_the_program_that_started_it(tiny_models: Any, tmp_path: Path) -> None:
    """The parent is killed and can clean up nothing; one of its peers is paused besides."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    program = (
        "import json, os, signal, sys\n"
        "from shoal.peer.local_swarm import LocalSwarm\n"
        "with LocalSwarm(sys.argv[1], spans=[(0, 2), (2, 4)], weights='fp32') as swarm:\n"
        "    swarm.peers[1].pause()\n"
        "    print(json.dumps([peer.pid for peer in swarm.peers]), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    # A session of its own, as a terminal or a CI job would give it.
    done = warm_python.run(
        [sys.executable, "-P", "-c", program, str(tiny_models.get().directory)],
        starts_peers=True,
        capture_output=True,
        text=True,
        timeout=200,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    pids = json.loads(done.stdout)

    assert done.returncode == -signal.SIGKILL
    wait_until_dead([*pids, *(child for pid in pids for child in children_of(pid))])
    assert os.listdir(temporary) == []


def test_identity_file_is_kept_and_private(swarm: LocalSwarm, tmp_path: Path) -> None:
    path = tmp_path / "peer.key"
    peer_ids = []
    fingerprints: set[str] = set()
    for _ in range(2):
        peer = swarm.add((2, 4), identity=path)
        peer_ids.append(peer.peer_id)
        ours = asyncio.run(read_announcements(swarm))[peer.peer_id]
        fingerprints |= {endpoint.fingerprint for endpoint in ours.endpoints}
        peer.terminate()
        peer.wait(60)

    assert peer_ids[0] == peer_ids[1]
    # Whoever knows its announcement from before the restart must not take it for somebody else.
    assert len(fingerprints) == 1
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


def expect_one_line(result: tuple[int, str], *words: str, code: int = 1) -> None:
    """Expect an error: of the options (2), or of anything else (1)."""
    found, errors = result
    assert found == code
    assert "Traceback" not in errors
    assert len(errors.strip().splitlines()) == 1, errors
    for word in words:
        assert word in errors


def test_port_in_use_is_named(tiny_models: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run_shoal(
            "serve",
            str(tiny_models.get().directory),
            "--new-swarm",
            "--listen",
            f"127.0.0.1:{port}",
        )

    expect_one_line(result, f"port {port}", "in use", code=2)


def test_directory_port_in_use_is_named(swarm: LocalSwarm, tiny_models: Any) -> None:
    """Also where another p2pd has it, with which ours could share it."""
    port = swarm.initial_peers[0].split("/")[4]
    command = ["serve", str(tiny_models.get().directory), "--directory-port", port]

    result = run_shoal(*command, "--new-swarm")
    joining = run_shoal(*command, "--initial-peers", *swarm.initial_peers)

    expect_one_line(result, f"port {port}", "in use", code=2)
    expect_one_line(joining, f"port {port}", "in use", code=2)


def test_identity_of_a_running_peer_is_refused(
    swarm: LocalSwarm, tiny_models: Any, tmp_path: Path
) -> None:
    path, copy = tmp_path / "peer.key", tmp_path / "copy.key"
    peer = swarm.add((2, 4), identity=path)
    shutil.copy(path, copy)
    command = ["serve", str(tiny_models.get().directory), "--initial-peers", *peer.addresses]

    same_file = run_shoal(*command, "--identity", str(path))
    elsewhere = run_shoal(*command, "--identity", str(copy))
    peer.terminate()
    peer.wait(60)

    expect_one_line(same_file, "another running peer uses the identity", str(path), code=2)
    expect_one_line(elsewhere, "another running peer uses the identity", peer.addresses[0], code=2)


def test_address_of_another_peer_is_told_from_one_where_nobody_is(
    swarm: LocalSwarm, tiny_models: Any
) -> None:
    wrong = swarm.initial_peers[0].rpartition("/")[0] + f"/{UNKNOWN_PEER}"

    result = run_shoal("serve", str(tiny_models.get().directory), "--initial-peers", wrong)

    expect_one_line(result, "not the peer that the address names", wrong)


def test_clock_that_is_off_is_named(swarm: LocalSwarm, tiny_models: Any) -> None:
    program = (str(Path(__file__).with_name("skewed_peer.py")), "30")

    result = run_shoal(
        "serve",
        str(tiny_models.get().directory),
        "--initial-peers",
        *swarm.initial_peers,
        program=program,
        run=subprocess.run,  # hivemind keeps the clock that it finds when it is imported
    )

    expect_one_line(result, "clock")


def test_swarm_that_runs_is_not_started_again(swarm: LocalSwarm) -> None:
    num_peers = len(swarm.peers)

    with pytest.raises(UsageError, match=r"running already; add\(\)"):
        swarm.__enter__()

    assert len(swarm.peers) == num_peers
    assert swarm.peers[0].is_running


def test_swarm_whose_peer_cannot_start_says_why_and_leaves_nothing(tiny_models: Any) -> None:
    children = children_of(os.getpid())

    with pytest.raises(PeerProcessError, match="blocks 0:4"):
        LocalSwarm(tiny_models.get().directory, spans=[(0, 2), (2, 9)]).__enter__()

    assert children_of(os.getpid()) == children


def test_swarm_that_is_not_running_refuses_new_peers(tiny_models: Any) -> None:
    swarm = LocalSwarm(tiny_models.get().directory, spans=[(0, 4)])

    with pytest.raises(UsageError, match="not running"):
        swarm.add((0, 4))


@pytest.mark.parametrize(
    "run", [warm_python.run, pytest.param(subprocess.run, marks=pytest.mark.thorough)]
)
def test_script_that_never_closes_its_client_ends_quietly(
    swarm: LocalSwarm, tiny_models: Any, run: Callable[..., Any]
) -> None:
    program = (
        "import atexit, gc, sys\n"
        # Last of all, as the interpreter does it where it finds the time.
        "atexit.register(lambda: globals().pop('model') and gc.collect())\n"
        "from shoal.client import AutoDistributedModelForCausalLM\n"
        "model, *peers = sys.argv[1:]\n"
        "model = AutoDistributedModelForCausalLM.from_pretrained(model, initial_peers=peers)\n"
    )

    code, error = run_shoal(
        str(tiny_models.get().directory),
        *swarm.initial_peers,
        program=("-c", program),
        run=run,
    )

    assert (code, error) == (0, "")
