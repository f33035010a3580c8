"""Warm processes do what plain ones do: streams, groups, signals, environments, ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import warm_python
from processes import children_of, wait_until_dead

from shoal.cli.options.bundled_model import find_model
from shoal.peer.local_swarm.swarm import LocalSwarm

pytestmark = [pytest.mark.network, pytest.mark.slow]

POPENS = pytest.mark.parametrize(
    "popen", [subprocess.Popen, warm_python.Popen], ids=["plain", "warm"]
)
"""Whatever holds for one of them has to hold for the other."""

TELL = """
import json, os, random, signal, sys, tempfile, threading
import torch
facts = {
    "argv": sys.argv,
    "name": __name__,
    "stdin": sys.stdin.read(),
    "streams": [stream.name for stream in (sys.stdin, sys.stdout, sys.stderr)],
    "descriptors": sorted(map(int, os.listdir("/proc/self/fd")))[:-1],
    "is_leader": os.getpgrp() == os.getpid(),
    "group": os.getpgrp(),
    "folder": os.getcwd(),
    "variable": os.environ.get("SHOAL_TEST"),
    "path": sys.path[:2],
    "home": os.environ.get("HOME"),
    "temporary": tempfile.gettempdir(),
    "threads": [threading.active_count(), torch.get_num_threads()],
    "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    "wakeup": signal.set_wakeup_fd(-1),
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "customized": getattr(sys.modules.get("sitecustomize"), "WORD", None),
}
print(json.dumps(facts))
print("said", file=sys.stderr)
sys.exit(7)
"""


def make_command(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-P", "-c", code, *arguments]


def tell(popen: Any, **options: Any) -> tuple[dict[str, Any], str, int]:
    pipe = subprocess.PIPE
    command = make_command(TELL, "one", "two words")
    with popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, **options) as process:
        output, errors = process.communicate("asked")
    return json.loads(output), errors, process.returncode


def test_process_finds_what_a_plain_one_finds(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("WORD = 'of this folder'")
    options = {
        "cwd": tmp_path,
        "env": {
            **os.environ,
            "SHOAL_TEST": "value",
            "TMPDIR": str(tmp_path),
            "PYTHONPATH": os.pathsep.join([str(tmp_path), "/two"]),
        },
    }

    warm, plain = (tell(popen, **options) for popen in (warm_python.Popen, subprocess.Popen))

    assert warm == plain
    facts, errors, code = warm
    assert (facts["stdin"], facts["variable"], errors, code) == ("asked", "value", "said\n", 7)
    assert facts["argv"] == ["-c", "one", "two words"]
    assert facts["customized"] == "of this folder"
    assert facts["group"] == os.getpgrp()


@POPENS
@pytest.mark.parametrize(
    ("options", "expected"),
    [({"process_group": 0}, b"True False\n"), ({"start_new_session": True}, b"True True\n")],
    ids=["group", "session"],
)
def test_process_may_have_a_group_or_a_session_of_its_own(
    popen: Any, options: dict[str, Any], expected: bytes
) -> None:
    code = "import os; print(*(i == os.getpid() for i in (os.getpgrp(), os.getsid(0))))"
    with popen(make_command(code), stdout=subprocess.PIPE, **options) as process:
        assert process.communicate()[0] == expected


def test_random_numbers_of_two_processes_differ() -> None:
    code = (
        "import random, secrets, numpy, torch\n"
        "print(random.random(), secrets.token_hex(8), numpy.random.rand(), torch.initial_seed())"
    )
    outputs: set[bytes] = set()
    for _ in range(2):
        with warm_python.Popen(make_command(code), stdout=subprocess.PIPE) as process:
            outputs |= set(process.communicate()[0].split())

    assert len(outputs) == 8


@POPENS
def test_process_is_a_child_that_can_be_stopped_and_killed(popen: Any) -> None:
    with popen(make_command("input()"), stdin=subprocess.PIPE) as process:
        assert process.poll() is None
        process.send_signal(signal.SIGSTOP)
        stopped = os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        assert process.pid in children_of(os.getpid())
        process.kill()

        assert process.wait() == -signal.SIGKILL
    assert stopped is not None
    assert stopped.si_status == signal.SIGSTOP


@POPENS
@pytest.mark.parametrize(
    ("code", "expected", "words"),
    [
        ("import sys; sys.exit('a sentence')", 1, "a sentence\n"),
        ("import sys; sys.exit()", 0, ""),
        ("raise ValueError('wrong')", 1, "ValueError: wrong\n"),
        ("import atexit; atexit.register(print, 'late')", 0, "late\n"),
        ("import threading, time\n"
         "threading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()", 0, "late\n"),
    ],
    ids=["sentence", "nothing", "traceback", "atexit", "thread"],
)  # fmt: skip
def test_process_ends_as_the_interpreter_does(
    popen: Any, code: str, expected: int, words: str
) -> None:
    pipe = subprocess.PIPE
    with popen(make_command(code), stdout=pipe, stderr=subprocess.STDOUT, text=True) as process:
        output, _ = process.communicate()

    assert process.returncode == expected
    assert output.endswith(words)


def test_script_and_module_run_as_the_main_module(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys; print(__name__, sys.argv[1:], sys.path[0])")

    def run(*command: str) -> str:
        done = warm_python.run([sys.executable, *command], capture_output=True, text=True)
        return done.stdout

    assert run(str(script), "a") == f"__main__ ['a'] {tmp_path}\n"
    assert run("-P", str(script)).startswith("__main__ []")
    assert str(tmp_path) not in run("-P", str(script))
    assert run("-P", "-m", "shoal.cli", "--version").startswith("shoal ")


def test_one_process_finds_nothing_of_another(tmp_path: Path) -> None:
    """What a process changes in modules and the environment is its own."""
    change = "import os, shoal.peer.peer as peer; peer.make_service = None; os.environ['A_B'] = 'c'"
    look = "import os, shoal.peer.peer as peer; print(peer.make_service, os.environ.get('A_B'))"

    warm_python.run(make_command(change))
    done = warm_python.run(make_command(look), capture_output=True, text=True)

    assert done.stdout.startswith("<function make_service")
    assert done.stdout.endswith(" None\n")


NOTE_IMPORTS = """
import atexit, pathlib, sys
before = set(sys.modules)
def note():
    new = sorted(set(sys.modules) - before)
    pathlib.Path(__file__).with_name(sys.argv[1]).write_text(" ".join(new))
atexit.register(note)
"""


def test_peer_and_client_have_nothing_left_to_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of us nor of others: where imports move, into functions too, they are followed here."""
    (tmp_path / "sitecustomize.py").write_text(NOTE_IMPORTS)
    warm_python.forge.start()  # it is not to note what it imports
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    with LocalSwarm(find_model(), spans=[(0, 8)]) as swarm:
        shoal = [sys.executable, "-P", "-m", "shoal.cli"]
        write = ["generate", swarm.model, "Once", "--initial-peers", *swarm.initial_peers]
        done = warm_python.run([*shoal, *write], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    for name in ("serve", "generate"):
        imported = (tmp_path / name).read_text().split()
        assert not [
            module for module in imported if module.partition(".")[0] not in sys.stdlib_module_names
        ]


END = """
waiting = [sys.executable, "-P", "-c", "input()"]
process = warm_python.Popen(waiting, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
print(warm_python.forge.pid, process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    "run",
    [
        partial(warm_python.run, starts_peers=True),
        pytest.param(subprocess.run, marks=pytest.mark.thorough),
    ],
    ids=["warm", "plain"],
)
def test_everything_ends_with_a_program_that_is_killed(run: Any) -> None:
    """A peer of a program that dies ends with its stdin, and what forks them does so, too."""
    code = f"import os, signal, subprocess, sys, warm_python\n{END}"
    here = str(Path(warm_python.__file__).parent)

    done = run(
        make_command(code),
        env={**os.environ, "PYTHONPATH": here},
        stdout=subprocess.PIPE,
        text=True,
    )

    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2
    wait_until_dead(pids)
