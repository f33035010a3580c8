"""`generate`, `doctor` and `swarm` against real processes on this machine."""

from __future__ import annotations

import contextlib
import io
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import warm_python
from transformers import AutoConfig

from shoal.cli.main import main
from shoal.client import LoraAdapter
from shoal.peer.local_swarm.swarm import LocalSwarm

pytestmark = [pytest.mark.network, pytest.mark.slow]

PROMPT = "Once upon a time"
JOINING = "Joining the swarm"
FETCHING = "Waiting for peers to fetch the adapter"
CLOSED = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"


@pytest.fixture(scope="module")
def swarm(byte_model: Path) -> Iterator[LocalSwarm]:
    """Three peers; the second half of the blocks is on two of them."""
    with LocalSwarm(byte_model, spans=[(0, 2), (2, 4), (2, 4)], weights="fp32") as swarm:
        yield swarm


@pytest.fixture(scope="module")
def five_tokens(swarm: LocalSwarm, byte_model: Path) -> str:
    """The text of five tokens behind the prompt."""
    command = ["generate", str(byte_model), PROMPT, "--max-new-tokens", "5", "--json"]
    with (
        contextlib.redirect_stdout(io.StringIO()) as output,
        contextlib.redirect_stderr(io.StringIO()),
    ):
        assert main([*command, "--initial-peers", *swarm.initial_peers]) == 0
    return json.loads(output.getvalue())["text"]


def run_json(
    arguments: list[str], capsys: pytest.CaptureFixture[str], *, is_adapter_published: bool = False
) -> tuple[int, Any]:
    code = main([*arguments, "--json"])
    output = capsys.readouterr()
    notices = [JOINING] * (arguments[0] == "generate") + [FETCHING] * is_adapter_published
    assert output.err.splitlines() == notices
    return code, json.loads(output.out)


def test_generate_reports_what_transformers_would_say(
    swarm: LocalSwarm, byte_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(byte_model)
    reference: Any = AutoModelForCausalLM.from_pretrained(byte_model, dtype=torch.float32)
    ids_BT = tokenizer(PROMPT, return_tensors="pt").input_ids
    expected_BT = reference.generate(ids_BT, max_new_tokens=12, do_sample=False)
    capsys.readouterr()  # what loading the reference said

    command = ["generate", str(byte_model), PROMPT, "--max-new-tokens", "12", "--initial-peers"]
    code, result = run_json([*command, *swarm.initial_peers], capsys)

    assert code == 0
    assert result["text"] == tokenizer.decode(expected_BT[0, ids_BT.shape[1] :])
    assert result["tokens"] == 12
    assert (result["finish_reason"], result["kv_format"]) == ("length", "float")
    assert result["failovers"] == []
    assert [hop["span"] for hop in result["route"]] == ["0:2", "2:4"]
    assert result["route"][0]["peer_id"] == swarm.peers[0].peer_id
    assert 0 < result["time_to_first_token_seconds"] <= result["seconds"]
    assert result["tokens_per_second"] > 0


def test_generate_shows_no_control_characters_that_a_model_chose(
    swarm: LocalSwarm, byte_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copying = "\x1b]52;c;eA==\x07 \x9b2J\x7f"
    model = shutil.copytree(byte_model, tmp_path / "model")
    saved = json.loads((model / "tokenizer.json").read_text())
    replacement = {"type": "Replace", "pattern": {"Regex": r"[\s\S]"}, "content": copying}
    saved["decoder"] = {"type": "Sequence", "decoders": [saved["decoder"], replacement]}
    (model / "tokenizer.json").write_text(json.dumps(saved))
    command = ["generate", str(model), PROMPT, "--max-new-tokens", "8", "--initial-peers"]

    assert main([*command, *swarm.initial_peers]) == 0
    shown = capsys.readouterr().out
    code, result = run_json([*command, *swarm.initial_peers], capsys)

    num_letters = len(result["text"]) // len(copying)
    assert (code, result["text"]) == (0, copying * num_letters)  # programs get what the model says
    assert num_letters > 0
    assert shown == "]52;c;eA== 2J" * num_letters + "\n"


def test_bench_measures_a_swarm_that_runs(
    swarm: LocalSwarm, byte_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["bench", "--model", str(byte_model), "--initial-peers"]
    code, result = run_json([*command, *swarm.initial_peers], capsys)

    assert code == 0
    figures = {figure["name"]: figure["value"] for figure in result["figures"]}
    assert (figures["peers on the way"], figures["peers lost meanwhile"]) == (2, 0)
    assert figures["steps"] > 0


def test_generate_with_a_seed_repeats_itself_and_beams_over_int8_caches_work(
    swarm: LocalSwarm, byte_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["generate", str(byte_model), PROMPT, "--max-new-tokens", "6"]
    peers = ["--initial-peers", *swarm.initial_peers]

    texts = [run_json([*command, "--seed", "5", *peers], capsys)[1]["text"] for _ in range(2)]
    code, searched = run_json([*command, "--beams", "2", "--kv", "int8", *peers], capsys)

    assert texts[0] == texts[1]
    assert code == 0
    assert (searched["tokens"], searched["kv_format"]) == (6, "int8")


def test_generate_names_the_blocks_that_have_no_standby(
    swarm: LocalSwarm, byte_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["generate", str(byte_model), PROMPT, "--max-new-tokens", "2", "--initial-peers"]

    assert main([*command, *swarm.initial_peers, "--standby", "--json"]) == 0

    output = capsys.readouterr()
    assert json.loads(output.out)["blocks_without_standby"] == ["0:2"]
    assert "No standby for blocks 0:2:" in output.err


def test_generate_streams_text_to_stdout_and_its_report_to_stderr(
    swarm: LocalSwarm, byte_model: Path, five_tokens: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["generate", str(byte_model), PROMPT, "--max-new-tokens", "5", "--initial-peers"]

    assert main([*command, *swarm.initial_peers]) == 0

    output = capsys.readouterr()
    assert output.out == five_tokens + "\n"
    assert output.err.startswith(f"{JOINING}\n5 tokens, ")
    assert f"{swarm.peers[0].peer_id[-6:]}[0:2]" in output.err


def test_chat_answers_each_line_of_a_pipe_and_forgets_on_reset(
    swarm: LocalSwarm,
    byte_model: Path,
    five_tokens: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words, text = ["--max-new-tokens", "5", "--initial-peers", *swarm.initial_peers], five_tokens
    lines = [PROMPT, "/reset", "", PROMPT, "and then", "/quit", "never said"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))

    assert main(["chat", str(byte_model), *words]) == 0

    output = capsys.readouterr()
    assert output.out.startswith(f"{text}\n{text}\n")
    assert len(output.out) > len(f"{text}\n{text}\n\n")
    assert output.err.count("no chat template") == 1


def test_ctrl_c_ends_an_answer_and_not_the_chat(swarm: LocalSwarm, byte_model: Path) -> None:
    master, slave = os.openpty()
    command = [sys.executable, "-P", "-m", "shoal.cli", "chat", str(byte_model)]
    command += ["--max-new-tokens", "100", "--initial-peers", *swarm.initial_peers]
    shown = ""

    def wait_until_shown(text: str) -> None:
        nonlocal shown
        while text not in shown:
            assert select.select([master], [], [], 60.0)[0], shown
            shown += os.read(master, 4096).decode(errors="replace")
        shown = shown.partition(text)[2]

    with warm_python.Popen(command, stdin=slave, stdout=slave, stderr=slave) as process:
        os.close(slave)
        try:
            wait_until_shown("> ")
            for peer in swarm.peers:
                peer.pause()  # so that no answer comes
            os.write(master, PROMPT.encode() + b"\n")
            wait_until_shown("Generating")
            process.send_signal(signal.SIGINT)
            wait_until_shown("Stopped. Ctrl-D or /quit")
            wait_until_shown("> ")
            for peer in swarm.peers:
                peer.resume()
            os.write(master, b"/quit\n")
            assert process.wait(60) == 0
        finally:
            for peer in swarm.peers:
                peer.resume()
            process.kill()
    os.close(master)


def test_generate_writes_a_trace_and_sums_it_up(
    swarm: LocalSwarm, byte_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.json"
    command = ["generate", str(byte_model), PROMPT, "--max-new-tokens", "5", "--trace", str(path)]
    command += ["--initial-peers", *swarm.initial_peers]

    assert main(command) == 0
    table = capsys.readouterr().err.splitlines()[2:]
    events = json.loads(path.read_text())["traceEvents"]
    code, result = run_json(command, capsys)

    assert table[0].startswith("where the time went")
    assert max(map(len, table)) <= 80
    assert any(line.startswith(f"  …{swarm.peers[0].peer_id[-6:]}[0:2]") for line in table)
    names = [event["name"] for event in events]
    assert names.count("compute") == 5 * 2
    assert names.count("open") == 2
    assert code == 0
    assert result["trace"]["prefill"]["tokens"] == len(PROMPT)
    decode = result["trace"]["decode"]
    assert [(hop["span"], hop["tokens"]) for hop in decode["hops"]] == [("0:2", 4), ("2:4", 4)]
    assert all(hop["compute_seconds"] > 0 for hop in decode["hops"])
    assert 0 < decode["seconds"] < result["seconds"]


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_generate_shows_its_text_before_it_says_that_the_trace_cannot_be_written(
    swarm: LocalSwarm,
    byte_model: Path,
    five_tokens: str,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
) -> None:
    command = ["generate", str(byte_model), PROMPT, "--max-new-tokens", "5", *options]
    command += ["--initial-peers", *swarm.initial_peers]

    assert main([*command, "--trace", "/dev/full"]) != 0

    output = capsys.readouterr()
    if options:
        result, error = map(json.loads, output.out.splitlines())
        assert result["text"] == five_tokens
        assert result["trace"]["decode"]["tokens"] == 4
        assert error["kind"] == "UsageError"
    else:
        assert output.out == five_tokens + "\n"
        assert "where the time went" in output.err
    assert output.err.endswith("choose another --trace FILE\n")


def test_generate_says_at_once_which_blocks_it_waits_for(byte_model: Path) -> None:
    with LocalSwarm(byte_model, spans=[(0, 2)], weights="fp32") as swarm:
        command = ["generate", str(byte_model), PROMPT, "--wait", "1", "--json", "--initial-peers"]
        process = warm_python.run(
            [sys.executable, "-P", "-m", "shoal.cli", *command, *swarm.initial_peers],
            capture_output=True,
            text=True,
        )

    assert process.returncode == 1
    assert json.loads(process.stdout)["kind"] == "RouteError"
    joining, notice, error = process.stderr.splitlines()
    assert joining == JOINING
    assert notice == "Waiting for blocks 2:4, at most 1 s"
    assert "blocks 2:4" in error


def test_generate_says_in_the_middle_of_a_text_which_blocks_it_waits_for(byte_model: Path) -> None:
    """It has said before that nobody could stand by for them."""
    with LocalSwarm(byte_model, spans=[(0, 2), (2, 4)], weights="fp32") as swarm:
        command = ["generate", str(byte_model), PROMPT, "--standby", "--wait", "4"]
        command += ["--max-new-tokens", "480", "--initial-peers", *swarm.initial_peers]
        with warm_python.Popen(
            [sys.executable, "-P", "-m", "shoal.cli", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as process:
            assert process.stdout is not None
            assert process.stdout.read(1)
            swarm.peers[1].kill()
            _, errors = process.communicate(timeout=120)

    assert process.returncode == 1
    joining, warning, notice, error = errors.decode().splitlines()
    assert joining == JOINING
    assert warning.startswith("No standby for blocks 0:2, 2:4: no other peer serves them")
    assert notice == "Waiting for blocks 2:4, at most 4 s"
    assert "blocks 2:4" in error


@pytest.mark.thorough  # twenty seconds
def test_generate_takes_any_text_in_a_locale_without_letters_beyond_ascii(
    swarm: LocalSwarm, byte_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = "Zoë said: “"
    options = ["--max-new-tokens", "9", "--initial-peers", *swarm.initial_peers]
    expected = run_json(["generate", str(byte_model), prompt, *options], capsys)[1]["text"]
    ascii_only = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}

    def run(prompt: str, *more: str, stdin: str = "") -> str:
        command = ["-m", "shoal.cli", "generate", str(byte_model), prompt, *options, *more]
        process = subprocess.run(
            [sys.executable, "-P", *command],
            capture_output=True,
            text=True,
            encoding="utf-8",
            input=stdin,
            env=ascii_only,
        )
        assert process.returncode == 0, process.stderr
        return process.stdout

    assert json.loads(run(prompt, "--json"))["text"] == expected
    assert json.loads(run("-", "--json", stdin=prompt))["text"] == expected
    assert run(prompt).isascii()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_text_that_is_interrupted_ends_its_line(
    swarm: LocalSwarm, byte_model: Path, number: signal.Signals
) -> None:
    command = ["generate", str(byte_model), PROMPT, "--max-new-tokens", "400"]
    with warm_python.Popen(
        [
            sys.executable,
            "-P",
            "-m",
            "shoal.cli",
            *command,
            "--initial-peers",
            *swarm.initial_peers,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        begun = process.stdout.read(1)
        process.send_signal(number)
        text, errors = process.communicate(timeout=60)

    assert (process.returncode, errors) == (130, f"{JOINING}\n".encode())
    assert (begun + text).endswith(b"\n")


def test_doctor_finds_a_sound_swarm_well(
    swarm: LocalSwarm, byte_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, result = run_json(
        ["doctor", str(byte_model), "--initial-peers", *swarm.initial_peers], capsys
    )

    assert code == 0
    assert result["ok"]
    assert result["usable"]
    assert result["missing"] == []
    assert {peer["peer_id"] for peer in result["peers"]} == {p.peer_id for p in swarm.peers}
    assert all(peer["reachable"] and peer["rtt_seconds"] > 0 for peer in result["peers"])
    assert all(isinstance(peer["clock_ahead_seconds"], float) for peer in result["peers"])
    assert set(result["findings"][0]) == {"name", "ok", "status", "detail", "fix"}


def test_doctor_says_which_address_is_closed(
    byte_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["doctor", str(byte_model), "--initial-peers", CLOSED])

    output = capsys.readouterr().out
    assert code == 1
    assert "127.0.0.1:1 (peer …x6nXTN)" in output.replace("...", "…")
    assert "nobody listens" in output
    assert "check that this peer still runs" in output
    assert all(len(line) <= 80 for line in output.splitlines())


def test_doctor_names_a_killed_peer_and_its_blocks(
    byte_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with LocalSwarm(byte_model, spans=[(0, 2), (2, 3), (3, 4)], weights="fp32") as swarm:
        victim = swarm.peers[1]
        victim.kill()
        code, result = run_json(
            ["doctor", str(byte_model), "--initial-peers", *swarm.initial_peers], capsys
        )

    assert code == 1
    assert not result["usable"]
    assert result["missing"] == ["2:3"]
    faults = {peer["peer_id"]: peer["fault"] for peer in result["peers"]}
    assert faults.pop(victim.peer_id) == "closed port"
    assert set(faults.values()) == {None}
    (finding,) = [finding for finding in result["findings"] if finding["name"] == "blocks"]
    assert "2:3" in finding["detail"]
    assert "--blocks 2:3" in finding["fix"]


def test_doctor_warns_of_a_killed_peer_whose_blocks_others_serve(
    byte_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with LocalSwarm(byte_model, spans=[(0, 4), (2, 4)], weights="fp32") as swarm:
        victim = swarm.peers[1]
        victim.kill()
        code = main(["doctor", str(byte_model), "--initial-peers", swarm.initial_peers[0]])

    output = " ".join(capsys.readouterr().out.split())
    assert code == 0
    assert f"! peer …{victim.peer_id[-6:]}" in output.replace("...", "…")
    assert "closed port" in output
    assert "Text can be generated, with 1 warning: see the lines with ! above." in output


@pytest.fixture
def adapter(byte_model: Path, tmp_path: Path) -> Path:
    """A folder with an adapter that changes what is written."""
    model: Any = SimpleNamespace(config=AutoConfig.from_pretrained(byte_model))
    adapter = LoraAdapter.create(model, rank=2)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for matrix in adapter.parameters():
            matrix.copy_(torch.randn(matrix.shape, generator=generator))
    adapter.save(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_adapter_is_there_for_others_until_who_publishes_it_is_stopped(
    swarm: LocalSwarm, byte_model: Path, adapter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peers = ["--initial-peers", swarm.initial_peers[0]]
    command = ["generate", str(byte_model), PROMPT, "--max-new-tokens", "6", *peers]
    publish = ["-m", "shoal.cli", "publish", str(byte_model), str(adapter), "--json", *peers]
    with warm_python.Popen(
        [sys.executable, "-P", *publish], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        try:
            published = json.loads(process.stdout.readline())
            given = {published["digest"].upper(): True, str(adapter): False}
            results = [
                run_json([*command, "--adapter", one], capsys, is_adapter_published=is_published)
                for one, is_published in given.items()
            ]
            process.send_signal(signal.SIGINT)
            withdrawn, errors = process.communicate(timeout=60)
        finally:
            process.kill()

    assert results[0][1]["text"] == results[1][1]["text"]
    assert (process.returncode, errors) == (0, b"")
    assert json.loads(withdrawn) == {"event": "withdrawn", "digest": published["digest"]}
    assert main([*command, "--wait", "0", "--adapter", published["digest"]]) == 1
    assert capsys.readouterr().err.splitlines()[:2] == [JOINING, FETCHING]


def test_swarm_reports_a_death_and_leaves_nothing_behind(byte_model: Path) -> None:
    command = [sys.executable, "-P", "-m", "shoal.cli", "swarm", str(byte_model)]
    process = warm_python.Popen(
        [*command, "--peers", "2", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            online = json.loads(process.stdout.readline())
            pids = [peer["pid"] for peer in online["peers"]]
            os.kill(pids[1], signal.SIGKILL)
            ended = json.loads(process.stdout.readline())
            process.send_signal(signal.SIGTERM)
            stopped = json.loads(process.stdout.readline())
            code = process.wait(60)
            errors = process.stderr.read()
        finally:
            process.kill()

    assert online["event"] == "online"
    assert [peer["span"] for peer in online["peers"]] == ["0:2", "2:4"]
    assert online["initial_peers"]
    assert ended["event"] == "peer_ended"
    assert (ended["pid"], ended["exit_code"]) == (pids[1], -signal.SIGKILL)
    assert ended["missing"] == ["2:4"]
    assert stopped == {"event": "stopped"}
    assert (code, errors) == (0, b"")
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 0)
            pytest.fail(f"peer {pid} is still there")


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.thorough)]
)
def test_swarm_that_is_stopped_before_it_is_ready_says_so_by_its_code(
    byte_model: Path, number: signal.Signals
) -> None:
    command = [sys.executable, "-P", "-m", "shoal.cli", "swarm", str(byte_model)]
    with subprocess.Popen(
        [*command, "--peers", "2", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while process.poll() is None and not children.read_text():
            time.sleep(0.01)
        process.send_signal(number)
        output, errors = process.communicate(timeout=60)

    assert process.returncode == 130
    assert json.loads(output) == {"error": "interrupted", "kind": "KeyboardInterrupt"}
    assert errors == b""
