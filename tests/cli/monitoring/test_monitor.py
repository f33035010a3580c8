"""`shoal monitor`, against real processes: a swarm that is whole, and one that loses a peer."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import warm_python
from announcements import NOW, identity_of, make_announcement
from screens import Screen
from watched_swarms import read

from shoal.cli.main import main
from shoal.cli.monitoring.health_table import show_health
from shoal.cli.monitoring.page_server import choose_place, count_room, list_own_names
from shoal.cli.terminal.terminal import Terminal
from shoal.client.monitor.access import make_access
from shoal.client.monitor.description import describe
from shoal.client.monitor.state import ProbeResult, reduce_probe, reduce_reading
from shoal.peer.hosting.hosted_model import BlockSizes, find_room
from shoal.peer.local_swarm.swarm import LocalSwarm
from shoal.peer.process.config import (
    ANNOUNCEMENT_BYTES,
    PeerConfig,
    choose_adapter_bytes,
    choose_pass_bytes,
)
from shoal.peer.streams.stream_host import MAX_PENDING_BYTES
from shoal.protocol.endpoints import Endpoint, Relay
from shoal.protocol.records.swarm_view import SwarmView
from shoal.protocol.spans import Span

PATIENCE_SECONDS = 60.0
PROGRAM = (sys.executable, "-P", "-m", "shoal.cli")
NOBODY = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWQyuxzntqhd3YyTNJkMXfusCsFufWwg1vupmRzebH83rU"


@pytest.fixture(scope="module")
def swarm(byte_model: Path) -> Iterator[LocalSwarm]:
    """A swarm with two replicas of each block; a test kills all peers but the last."""
    with LocalSwarm(byte_model, [(0, 4), (0, 2), (2, 4)], weights="fp32") as swarm:
        yield swarm


@pytest.fixture(scope="module")
def page(swarm: LocalSwarm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a monitor's page."""
    history = tmp_path_factory.mktemp("monitor") / "monitor.sqlite"
    command = (
        *("monitor", "--initial-peers", *swarm.initial_peers),
        *("--listen", "127.0.0.1:0", "--history", str(history)),
    )
    with warm_python.Popen(
        [*PROGRAM, *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            line = process.stdout.readline().decode()
            yield line.partition("http://")[2].partition("/ ")[0]
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_SECONDS) == 0
            assert process.stderr.read() == b""


def ask(page: str, path: str, host: str = "") -> tuple[int, bytes, dict[str, str]]:
    request = urllib.request.Request(f"http://{page}{path}", headers={"Host": host or page})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as answer:
            return answer.status, answer.read(), dict(answer.headers)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(), dict(error.headers)


def wait_for_state(page: str, is_there: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Return the state of the swarm once it is as expected."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        state = json.loads(ask(page, "/state.json")[1])
        if is_there(state):
            return state
        assert time.monotonic() < deadline, state
        time.sleep(0.2)


@pytest.mark.network
@pytest.mark.slow
def test_whole_swarm_is_healthy(
    swarm: LocalSwarm, page: str, byte_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["monitor", "--once", "--canary", str(byte_model), "--json"]
    assert main([*command, "--initial-peers", *swarm.initial_peers]) == 0

    state = json.loads(capsys.readouterr().out)
    (canary,) = state["canaries"]
    assert (canary["error"], canary["is_same"], bool(canary["text"])) == ("", True, True)
    assert canary["model_id"] == state["models"][0]["model_id"]
    assert canary["first_token_seconds"] > 0 < canary["tokens_per_second"]
    assert {hop["span"] for hop in canary["hops"]} <= {"0:4", "0:2", "2:4"}
    assert all(hop["compute_seconds"] > 0 <= hop["network_seconds"] for hop in canary["hops"])
    assert (state["health"], state["exit_code"], state["error"]) == ("healthy", 0, "")
    (model,) = state["models"]
    assert (model["depths"], model["missing"], model["single"]) == ([2] * 4, [], [])
    assert all(peer["rtt_seconds"] > 0 for peer in model["peers"])
    assert wait_for_state(page, lambda state: bool(state["models"]))["health"] == "healthy"


@pytest.mark.network
@pytest.mark.slow
def test_page_is_complete_without_scripts_and_runs_no_others(page: str) -> None:
    wait_for_state(page, lambda state: bool(state["models"]))

    status, text, headers = ask(page, "/")

    assert status == 200
    assert b"Every block of every model has two replicas or more." in text
    assert text.count(b"<tr data-id=") == 3
    policy = headers["content-security-policy"]
    assert "default-src 'none'; script-src 'self'; style-src 'self'" in policy
    assert b"<script>" not in text
    assert b"style=" not in text
    assert ask(page, "/static/echarts.min.js")[0] == 200
    assert ask(page, "/healthz")[:2] == (200, b"ok")


@pytest.mark.network
@pytest.mark.slow
def test_page_is_not_given_out_under_names_of_others(page: str) -> None:
    assert ask(page, "/", host="evil.example")[0] == 400
    assert ask(page, "/", host="localhost:1")[0] == 200


@pytest.mark.network
@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    ["/model/none/history.json", "/what-if?model=none", "/static/../app.py", "/static/none", "/no"],
)
def test_what_is_not_there_is_not_found(page: str, path: str) -> None:
    assert ask(page, path)[0] == 404


@pytest.mark.network
@pytest.mark.slow
def test_killed_peer_is_lost_and_its_blocks_have_a_single_replica(
    swarm: LocalSwarm, page: str, capsys: pytest.CaptureFixture[str]
) -> None:
    state = wait_for_state(page, lambda state: bool(state["models"]))
    model_id, killed = state["models"][0]["model_id"], swarm.peers[1]
    question = f"/what-if?model={model_id}&lose={killed.peer_id[-6:]}&room=2"
    answer = ask(page, question)[1].decode()
    assert "Blocks 0:2 have a single replica." in answer
    assert "would serve blocks <strong>0:2</strong>" in answer
    answer = ask(page, f"/what-if?model={model_id}&memory=12")[1].decode()
    assert "has room for 4 blocks of 0 MiB" in answer
    assert "would serve blocks <strong>" in answer
    with urllib.request.urlopen(f"http://{page}/events", timeout=PATIENCE_SECONDS) as events:
        assert events.readline() == b"event: view\n"

        killed.kill()
        state = wait_for_state(page, lambda state: state["health"] == "degraded")

        assert (state["models"][0]["depths"], state["models"][0]["single"]) == (
            [1, 1, 2, 2],
            ["0:2"],
        )
        event = state["events"][0]
        assert (event["kind"], event["peer_id"]) == ("lost", killed.peer_id)
        while events.readline() != b"event: history\n":
            pass
    history = json.loads(ask(page, f"/model/{model_id}/history.json")[1])
    assert [area[:2] + area[4:] for area in history["areas"]][-2:] == [[0, 2, 1], [2, 4, 2]]
    assert history["under_replicated"][0] == ["to 1 min", 2]

    status, metrics, headers = ask(page, "/metrics")
    assert (status, headers["content-type"].partition(";")[0]) == (200, "text/plain")
    assert b'shoal_swarm_events_total{kind="lost"} 1.0' in metrics

    assert main(["monitor", "--once", "--initial-peers", *swarm.initial_peers]) == 1
    assert "Blocks with a single replica: 0:2" in capsys.readouterr().out

    swarm.peers[0].kill()
    ended = warm_python.run(
        [*PROGRAM, "monitor", "--once", "--initial-peers", *swarm.initial_peers],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert (ended.returncode, ended.stderr) == (2, "")
    assert "Blocks with no replica: 0:2" in ended.stdout


@pytest.mark.network
@pytest.mark.slow
async def test_addresses_in_networks_that_the_swarm_is_not_in_are_not_dialled(
    swarm: LocalSwarm,
) -> None:
    access = make_access(None)
    elsewhere = Endpoint("fd00:77::7", 22, "c" * 64)
    relay = Relay("fd00:77::7", 22, identity_of(2).peer_id)
    direct = make_announcement(1, endpoints=(elsewhere,))

    async with AsyncExitStack() as open_things:
        transport, directory = await access.join(swarm.initial_peers)
        open_things.push_async_callback(directory.close)
        open_things.push_async_callback(transport.close)

        for announced in (direct, replace(direct, endpoints=(), relays=(relay,))):
            result = await access.probe(announced, transport)
            assert "in a network that this peer does not share" in result.fault
        # The directory may still name peers that an earlier test has killed.
        peers = await directory.lookup((await directory.list_models())[0])
        (peer,) = (peer for peer in peers if peer.peer_id == swarm.peers[2].peer_id)
        assert not (await access.probe(peer, transport)).fault


def test_directory_that_does_not_answer_is_told_as_that(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["monitor", "--once", "--initial-peers", NOBODY, "--json"]) == 3

    state = json.loads(capsys.readouterr().out)
    assert (state["health"], state["models"]) == ("unknown", [])
    assert "no initial peer can be reached" in state["error"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--nonsense"],
        [],
        ["--json"],
        ["--initial-peers", "x"],
        ["--listen", "here:99999"],
        ["--model", "x"],
        ["--canary", "/nothing", "--initial-peers", NOBODY],
        ["--webhook", "file:///x", "--initial-peers", NOBODY, "--listen", "127.0.0.1:0"],
        ["--webhook", "http://x", "--once", "--initial-peers", NOBODY],
    ],
)
def test_wrong_usage_is_no_state_of_a_swarm(arguments: list[str]) -> None:
    try:
        code = main(["monitor", *arguments])
    except SystemExit as ended:
        code = ended.code
    assert code == 64


def test_webhook_may_stand_in_a_private_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = tmp_path / "webhook"
    secret.write_text("file:///x\n")
    command = ["monitor", "--webhook", f"@{secret}", "--initial-peers", NOBODY]
    for mode, error in ((0o644, "run `chmod 600"), (0o600, "has to begin with https://")):
        secret.chmod(mode)

        assert main(command) == 64

        assert error in capsys.readouterr().err


def test_table_fits_and_faults_are_in_words() -> None:
    peers = make_announcement(1), make_announcement(2, span=Span(4, 8))
    model_id, lost = peers[0].model_id, peers[1].peer_id
    state = read(*peers)
    state, _ = reduce_reading(state, model_id, peers, NOW + 40)
    fault = ProbeResult(NOW + 41, "closed port: nobody answers at 127.0.0.1:4002")
    state, _ = reduce_probe(state, model_id, lost, fault)
    screen = Screen(is_terminal=False)

    show_health(describe(state, NOW + 42), Terminal(screen))

    lines = screen.text.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == " FAILING  1 model cannot be used: blocks are missing."
    assert "   Blocks with no replica: 4:8" in lines
    assert f"   …{lost[-6:]}: {fault.fault}" in lines
    assert [line.split()[2:3] for line in lines if line.startswith(f" …{lost[-6:]}")] == [["lost"]]


def test_texts_of_strangers_move_no_cursor_and_stay_short() -> None:
    words = "\x1b]52;c;eA==\x07\x9b2J\r\b<b>" + 10_240 * "x"
    texts = dict.fromkeys(("name", "device", "software", "kernels"), words)
    state = read(make_announcement(**texts))
    screen = Screen(is_terminal=False)

    show_health(describe(state, NOW), Terminal(screen))

    assert {letter for letter in screen.text if not letter.isprintable()} == {"\n"}
    assert max(map(len, screen.text.splitlines())) <= 80


@pytest.mark.parametrize(("start", "stop", "place"), [(0, 4, Span(4, 8)), (4, 8, Span(0, 4))])
def test_newcomer_goes_where_peers_would_go(start: int, stop: int, place: Span) -> None:
    peer = make_announcement(1, span=Span(start, stop))
    view = SwarmView.from_announcements(peer.model_id, [peer], NOW)

    assert choose_place(view, 4) == place


def test_names_of_the_page_are_those_of_this_machine() -> None:
    assert {"localhost", "127.0.0.1", "[::1]", "monitor.lan"} <= set(list_own_names("monitor.lan"))


@pytest.mark.parametrize("gibibytes", [2, 4, 12, 80])
def test_room_of_a_machine_is_counted_as_its_peer_would(gibibytes: int) -> None:
    free_bytes, block_bytes = gibibytes * 2**30, 200 * 2**20
    sizes = BlockSizes((block_bytes,) * 8, 4 * block_bytes, (1.0,) * 8)
    other_bytes = choose_pass_bytes(free_bytes) + choose_adapter_bytes(free_bytes)
    other_bytes += MAX_PENDING_BYTES + ANNOUNCEMENT_BYTES + PeerConfig(model="").kv_budget_bytes

    room = find_room(sizes, other_bytes, free_bytes)

    assert count_room(free_bytes, block_bytes) == room.amount // block_bytes
