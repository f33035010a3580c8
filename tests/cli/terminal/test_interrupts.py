"""Ctrl-C in the first moments of a command: quiet, wherever it strikes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.cli.terminal.interrupts import INTERRUPTED_FACTS, hold_interrupts, stop_on_sigterm

PROGRAM = Path(__file__).with_name("interrupted_shoal.py")
PEER = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"

SERVE = ("serve", "--new-swarm", "MODEL")
GENERATE = ("generate", "MODEL", "prompt", "--initial-peers", PEER)
DOCTOR = ("doctor", "MODEL", "--initial-peers", PEER)
GENERATE_JSON = (*GENERATE, "--json")
DEMO = ("demo", "--tokens", "9", "--kill-after", "3")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("shoal.cli.commands.serve", SERVE),
        ("SIGTERM torch.nn.functional", SERVE),
        pytest.param("torch.nn.functional", SERVE, marks=pytest.mark.thorough),
        ("transformers", GENERATE),
        ("transformers", GENERATE_JSON),
        pytest.param("transformers.models.llama", GENERATE, marks=pytest.mark.thorough),
        ("shoal.cli.commands.doctor", DOCTOR),
        pytest.param("hivemind", DOCTOR, marks=pytest.mark.thorough),
        ("shoal.peer.local_swarm.swarm", DEMO),
    ],
)
def test_interrupted_start_ends_quietly(
    module: str, command: tuple[str, ...], byte_model: Path
) -> None:
    arguments = [str(byte_model) if word == "MODEL" else word for word in command]
    name, _, module = module.rpartition(" ")

    process = subprocess.run(
        [sys.executable, "-P", str(PROGRAM), name or "SIGINT", module, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )

    assert process.stderr == "Joining the swarm\n" * ("generate" in command)
    assert process.stdout == f"{INTERRUPTED_FACTS}\n" * ("--json" in command)
    assert process.returncode == 130


@pytest.mark.slow
def test_interrupt_ends_a_program_whose_output_nobody_reads_any_more() -> None:
    program = (
        "import signal; from shoal.cli.terminal.interrupts import quit_at_once;"
        "quit_at_once(is_json=True); signal.raise_signal(signal.SIGINT)"
    )
    reading, writing = os.pipe()
    os.close(reading)

    with open(writing, "wb") as stdout:
        process = subprocess.run(
            [sys.executable, "-P", "-c", program], stdout=stdout, stderr=subprocess.PIPE, timeout=60
        )

    assert process.stderr == b""
    assert process.returncode == 130


def test_interrupts_wait_for_what_must_not_be_left_half_done() -> None:
    done: list[str] = []

    def work() -> None:
        with hold_interrupts():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)
            done.append("all of it")

    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(KeyboardInterrupt):
        work()

    assert done == ["all of it"]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_hangup_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_on_sigterm():
            signal.raise_signal(signal.SIGHUP)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
