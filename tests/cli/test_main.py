"""What the command line answers to mistakes: one sentence, and an exit code."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import warm_python
from screens import Screen

from shoal.cli.main import _in_one_line, _parse, main
from shoal.cli.options.bundled_model import BUNDLED_NAME, find_model
from shoal.cli.options.shared_options import join_addresses
from shoal.protocol.errors import ModelError

PUBLIC = "shoal:aeaaagaaaaaaaaaaaaaaaaaaaaaaaaaatsnisby"
PEER = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"

AWAY = PEER.replace("127.0.0.1", "192.0.2.1")


def run_and_read_error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Run a command that fails; return its exit code and the one line that it said."""
    try:
        code = main(arguments)
    except SystemExit as error:
        code = int(error.code or 0)
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1, output.err
    assert "Traceback" not in output.err
    return code, output.err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "COMMAND"),
        ("dance", "invalid choice: 'dance'"),
        ("generate", "MODEL, PROMPT"),
        (f"generate m p --max-new-tokens 0 --initial-peers {PEER}", "at least 1"),
        (f"generate m p --temperature -1 --initial-peers {PEER}", "at least 0"),
        (f"generate m p --top-p 1.5 --initial-peers {PEER}", "at most 1"),
        (f"generate m p --seed -3 --initial-peers {PEER}", "--seed"),
        ("swarm --peers none", "'none' is not a whole number"),
        (
            "serve m --new-swarm --device gpu",
            "the device must be cpu, cuda, cuda:N or auto, not 'gpu'",
        ),
        ("demo --weights nf4", "twenty times slower than int8"),
        ("serve m --new-swarm --block-cache lots", "'lots' is not a size"),
        ("serve m --new-swarm --block-cache=-1G", "a size cannot be negative"),
        ("serve m --new-swarm --threads 100000", "use at most"),
        ("serve m --new-swarm --announce-host 300.1.1.1", "'300.1.1.1' is not the name"),
        (f"serve m --new-swarm --announce-host {'a.' * 127}", "is not the name"),
        ("serve m --new-swarm --directory-port 65536", "'65536' is not a port"),
        ("serve m --new-swarm --announce-period 0.09", "0.1 to 200 seconds"),
        ("serve m --new-swarm --drain inf", "'inf' is not a number of at least 0"),
        ("serve m --new-swarm --kv-memory 9999T", "memory that this machine has"),
        (f"serve m --new-swarm --initial-peers {PEER}", "not allowed with"),
        ("serve m --new-swarm --metrics localhost", "is not PORT or HOST:PORT with a port up to"),
        ("serve m --new-swarm --metrics 127.0.0.1:65536", "is not PORT or HOST:PORT with a port"),
        ("serve m --new-swarm --metrics :9480", "is not PORT or HOST:PORT with a port up to"),
        (f"generate m p --max-new-tokens {2**63} --initial-peers {PEER}", "too large"),
        (f"generate m p --top-p 0 --initial-peers {PEER}", "above 0"),
        (f"generate m p --seed 9223372036854775808 --initial-peers {PEER}", "9223372036854775807"),
        (f"generate m p --trace - --initial-peers {PEER}", "'-' is not a file"),
        (f"generate m --tell --initial-peers {PEER}", "begins with - after `--`"),
        (
            "generate m hi there you",
            "generate: unexpected argument 'there'; put the prompt in quotes; see",
        ),
        ("generate m hi --tell", "generate: unexpected argument '--tell'; see"),
    ],
)
def test_wrong_arguments_are_one_line(
    line: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, error = run_and_read_error(line.split(), capsys)

    assert code == 2
    assert words in error
    assert "--help" in error


def test_four_bits_on_a_cpu_are_refused_with_advice(capsys: pytest.CaptureFixture[str]) -> None:
    code, error = run_and_read_error(
        ["serve", "shoal-stories", "--new-swarm", "--weights", "nf4"], capsys
    )

    assert code == 2
    assert "nf4 needs a CUDA device (shoal serve --device cuda)" in error
    assert "use int8" in error


@pytest.mark.parametrize(
    ("command", "option", "value", "number"),
    [
        ("serve m", "threads", str(4 * (os.cpu_count() or 1)), 4 * (os.cpu_count() or 1)),
        ("serve m", "directory_port", "65535", 65535),
        ("serve m", "announce_period", "0.1", 0.1),
        ("serve m", "announce_host", "2001:db8::1", "2001:db8::1"),
        ("generate m p --initial-peers x", "top_p", "1", 1.0),
        ("generate m p --initial-peers x", "seed", str(2**63 - 1), 2**63 - 1),
    ],
)
def test_bounds_themselves_are_taken(
    command: str, option: str, value: str, number: float | str
) -> None:
    options = _parse([*command.split(), f"--{option.replace('_', '-')}", value])

    assert getattr(options, option) == number


@pytest.mark.parametrize(
    ("words", "prompt"),
    [
        (["Once", "--initial-peers", "/ip4/a", "/ip4/b"], "Once"),
        (["--initial-peers", "/ip4/a", "/ip4/b", "Once"], "Once"),
        (["--initial-peers", "/ip4/a", "--initial-peers", "/ip4/b", "Once upon"], "Once upon"),
        (["--initial-peers", "/ip4/a,/ip4/b", "Once"], "Once"),
        (["--initial-peers=/ip4/a,/ip4/b", "Once"], "Once"),
        (["--initial", "/ip4/a", "/ip4/b", "--seed", "1", "--", "-hello"], "-hello"),
        (["--initial-peers", "/ip4/a", "/ip4/b", "--", "/ip4/is a prompt"], "/ip4/is a prompt"),
    ],
)
def test_initial_peers_leave_the_prompt_alone(words: list[str], prompt: str) -> None:
    options = _parse(["generate", "m", *words])

    assert options.prompt == prompt
    assert options.initial_peers == ["/ip4/a", "/ip4/b"]


def test_words_behind_two_dashes_are_left_as_they_are() -> None:
    words = ["generate", "--", "--initial-peers", "/ip4/a", "/ip4/b"]

    assert join_addresses(words) == words


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "m", "", "--initial-peers", PEER], "the prompt is empty"),
        (
            ["generate", "m", "p", "--trace", "/", "--initial-peers", PEER],
            "the trace to /: Is a dir",
        ),
        (["demo", "--tokens", "9", "--kill-after", "9"], "smaller --kill-after"),
        (["demo", "--tokens", "1"], "use --tokens 2 or more"),
        (["serve", "m", "--new-swarm", "--listen", f"1:{'9' * 5000}"], "HOST:PORT"),
        (["generate", "m", "\udcff", "--initial-peers", PEER], "not valid UTF-8"),
        (["generate", __file__, "p", "--initial-peers", PEER], "is a file"),
        (["generate", "/no/such", "p", "--initial-peers", PEER], "no model directory '/no/such'"),
        (["swarm", "no/such/model"], "no/such/model"),
        (["serve", "m"], ", or start a new swarm with --new-swarm"),
        (["generate", "m", "p"], "no swarm is given: pass --join CODE"),
        (["generate", "m", "p", "--join", "shoal:aeaaag"], "the join code was cut short"),
        (["bench"], "say what the swarm serves"),
        (["bench", "--initial-peers", PEER], "say what the swarm serves"),
        (["bench", "--model", "shoal-stories"], "no swarm is given: pass --join CODE"),
        (["generate", "m", "p", "--adapter", "no", "--initial-peers", PEER], "nor the digest of"),
        (["doctor", "--join", PEER], "an address, not a join code"),
        (["doctor", "--initial-peers", "foo"], "'foo' is not the address of a peer"),
        (["serve", "m", "--join", ""], "begins with shoal:"),
        (["serve", "m", "--new-swarm", "--join", "@no/such"], "cannot read a join code from no/su"),
        (["serve", "m", "--join", "@/dev/null"], "join code from /dev/null: the file is empty"),
        (["swarm-new", "--public", "--role", "own"], "a public swarm has no roles"),
        (["swarm-new", "--from", PUBLIC, "--initial-peers", "x"], "does not fit into a join code"),
        (["revoke", "12D3Koo", "--initial-peers", PEER], "a peer prints its id"),
        (["revoke", "--initial-peers", PEER], "give the owner's code with --join"),
        (["revoke", "--join", PUBLIC], "the join code names no address"),
        (["serve", "", "--new-swarm"], "the model name is empty"),
        (["serve", "m", "--new-swarm", "--announce-host", "0.0.0.0"], "others cannot dial"),
        (["serve", "m", "--local", "--initial-peers", AWAY], "this machine only"),
        (["serve", "m", "--new-swarm", "--blocks", "8"], "--blocks"),
        (["serve", "m", "--new-swarm", "--name", "x" * 33], "at most 32 characters"),
        (["serve", "m", "--new-swarm", "--name", "two\nlines"], "without control characters"),
        (["serve", "m" * 300, "--new-swarm"], "File name too long"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, error = run_and_read_error(arguments, capsys)

    assert code == (1 if words == "File name too long" else 2)  # the system says that
    assert error.startswith(f"shoal {arguments[0]}: ")
    assert words in error


def test_error_is_a_line_of_json_where_logs_are(capsys: pytest.CaptureFixture[str]) -> None:
    code, error = run_and_read_error(["serve", "", "--new-swarm", "--log-format", "json"], capsys)

    facts = json.loads(error)
    assert code == 2
    assert (facts["level"], facts["logger"]) == ("error", "shoal.cli")
    assert "the model name is empty" in facts["message"]


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (["generate", "/no/such", "p", "--initial-peers", PEER], "ModelError"),
        (["demo", "--prompt", ""], "UsageError"),
    ],
)
def test_error_is_a_json_object_for_who_asks_for_json(
    arguments: list[str], kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--json"]) == 2

    output = capsys.readouterr()
    facts = json.loads(output.out)
    assert facts["kind"] == kind
    assert output.err == f"shoal {arguments[0]}: {facts['error']}\n"


def test_error_shows_no_control_characters_of_a_file_from_the_hub(
    byte_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "\x1b]52;c;eA==\x07\x9b2J.safetensors"
    shutil.copy(byte_model / "config.json", tmp_path)
    index = {"weight_map": {"lm_head.weight": name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))

    code, error = run_and_read_error(["serve", str(tmp_path), "--new-swarm"], capsys)

    assert code == 2
    assert "names ]52;c;eA==2J.safetensors, which is not there" in error


def test_error_of_several_lines_is_told_in_one() -> None:
    assert _in_one_line(ModelError("one line\n  and another")) == "one line and another"


def test_swarm_refuses_more_peers_than_blocks(
    byte_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["swarm", str(byte_model), "--peers", "5", "--replicas", "1"]

    code, error = run_and_read_error(arguments, capsys)

    assert code == 2
    assert "has 4 blocks" in error


def test_bundled_name_gives_way_to_a_folder_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / BUNDLED_NAME).mkdir()
    (tmp_path / BUNDLED_NAME / "config.json").touch()

    assert find_model() == BUNDLED_NAME
    assert find_model("other/model") == "other/model"


def test_bundled_model_is_found_next_to_the_package() -> None:
    root = Path(__file__).resolve().parents[2]
    if not (root / "models" / BUNDLED_NAME / "config.json").is_file():
        with pytest.raises(ModelError, match="reinstall shoal"):
            find_model()
        return

    assert Path(find_model()) == root / "models" / BUNDLED_NAME


def test_summaries_of_commands_are_one_column(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])

    assert "    swarm-new   create the join code" in capsys.readouterr().out


@pytest.mark.slow
def test_process_ends_with_the_code_and_the_sentence() -> None:
    command = [sys.executable, "-P", "-m", "shoal.cli", "generate", "no/such/model", "-"]

    process = subprocess.run(
        [*command, "--initial-peers", PEER],
        input="a prompt\n",
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )

    assert process.returncode == 2
    assert process.stdout == ""
    assert process.stderr.startswith("shoal generate: ")
    assert process.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("full", ["stdout", "stderr"])
def test_output_that_takes_no_more_is_named(full: str, byte_model: Path) -> None:
    program = [sys.executable, "-P", "-m", "shoal.cli"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}

    with Path("/dev/full").open("w") as pipes[full]:
        process = warm_python.run(
            [*program, "doctor", str(byte_model), "--initial-peers", PEER],
            **pipes,
            text=True,
        )

    assert process.returncode == 1
    if full == "stdout":
        words = "shoal doctor: cannot write the output to stdout: No space left on device\n"
        assert process.stderr == words
    else:
        assert "address" in process.stdout


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_error_that_has_no_place_on_stdout_is_told_on_stderr_alone() -> None:
    command = [sys.executable, "-P", "-m", "shoal.cli", "serve", "/no/such", "--new-swarm"]
    with Path("/dev/full").open("w") as full:
        process = warm_python.run(
            [*command, "--json"], stdout=full, stderr=subprocess.PIPE, text=True
        )

    assert process.returncode == 2
    assert process.stderr.startswith("shoal serve: there is no model directory")
    assert process.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(
    "arguments",
    [["--version"], ["generate", "no/such/model", "-", "--initial-peers", PEER]],
    ids=lambda arguments: arguments[0],
)
def test_closed_streams_are_no_reason_to_fail(arguments: list[str], closed: str) -> None:
    program = [sys.executable, "-P", "-m", "shoal.cli", *arguments]

    process = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", *program],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )

    assert process.returncode == (0 if arguments == ["--version"] else 2)
    assert process.stderr.count("\n") <= 1, process.stderr


@pytest.mark.slow
def test_code_of_a_new_swarm_is_not_lost_where_stdout_is_closed() -> None:
    command = [sys.executable, "-P", "-m", "shoal.cli", "swarm-new"]

    process = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *command], stderr=subprocess.PIPE, text=True
    )

    assert process.returncode == 2
    assert process.stderr == (
        "shoal swarm-new: there is no stdout to print the code to; use --out FILE\n"
    )


@pytest.mark.slow
def test_unknown_name_is_one_line_where_there_is_no_network() -> None:
    command = ["-m", "shoal.cli", "generate", "nobody/nothing", "p", "--initial-peers", PEER]

    process = warm_python.run(
        [sys.executable, "-P", *command],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )

    assert process.returncode == 2
    joining, error = process.stderr.splitlines()
    assert joining == "Joining the swarm"
    assert "the Hub cannot be reached" in error
    assert "nobody/nothing" in process.stderr


@pytest.mark.slow
def test_level_of_logging_that_does_not_exist_is_ignored() -> None:
    process = warm_python.run(
        [sys.executable, "-P", "-m", "shoal.cli", "serve", "m"],
        capture_output=True,
        text=True,
        env={**os.environ, "SHOAL_LOG": "loud"},
    )

    assert process.returncode == 2
    assert process.stderr.count("\n") == 1, process.stderr


@pytest.mark.slow
def test_library_of_the_hub_logs_errors_without_control_characters_and_no_attempts() -> None:
    code = (
        "from shoal.cli.main import main\n"
        "main(['serve', 'm'])\n"
        "from huggingface_hub.utils import logging\n"
        "logging.get_logger('huggingface_hub.utils._http').warning('Retrying in 8s')\n"
        "logging.get_logger('huggingface_hub').error('a title \\x1b]0;x\\x07')\n"
    )

    process = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)

    assert "--new-swarm" in process.stderr
    assert "Retrying" not in process.stderr
    assert "a title ]0;x\n" in process.stderr


@pytest.mark.slow
def test_arguments_are_checked_before_anything_heavy_is_imported() -> None:
    code = (
        "import sys\n"
        "from shoal.cli.main import main\n"
        "from shoal.cli.command_table import SUMMARIES\n"
        "for command in SUMMARIES:\n"
        "    try:\n"
        "        main([command, '--no-such-option'])\n"
        "    except SystemExit as error:\n"
        "        assert error.code == (64 if command == 'monitor' else 2)\n"
        "print(*({'torch', 'transformers', 'hivemind', 'grpc'} & set(sys.modules)))\n"
    )

    process = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)

    assert process.returncode == 0, process.stderr
    assert process.stdout.split() == []


@pytest.mark.slow
def test_addresses_and_models_are_checked_before_anything_heavy_is_imported(
    tmp_path: Path,
) -> None:
    commands = [
        [name, model, *more, "--initial-peers", where]
        for name, more in (
            ("generate", ["a prompt"]),
            ("serve", []),
            ("finetune", ["--data", "texts", "--out", str(tmp_path / "run")]),
        )
        for model, where in (
            ("shoal-stories", "nowhere"),
            (str(tmp_path), PEER),
            ("no-such-model-anywhere", PEER),
        )
    ]
    code = (
        "import json, sys\n"
        "from shoal.cli.main import main\n"
        "print(*map(main, json.loads(sys.argv[1])))\n"
        "print(*({'torch', 'transformers', 'hivemind', 'grpc'} & set(sys.modules)))\n"
    )

    process = subprocess.run(
        [sys.executable, "-P", "-c", code, json.dumps(commands)],
        capture_output=True,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )

    assert process.stdout.splitlines() == ["2 2 2 2 2 2 2 2 2", ""], process.stderr


def test_error_is_wrapped_where_people_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr("sys.stderr", screen)

    assert main(["revoke", "nobody"]) == 2

    lines = screen.text.splitlines()
    assert len(lines) > 1
    assert all(len(line) <= 40 for line in lines)
