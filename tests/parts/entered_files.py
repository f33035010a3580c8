"""Lists the product files that a decode step, a gradient and an announcement enter, in order.

    PYTHONPATH=tests/parts .venv/bin/python -P -m entered_files

Client and peers are real processes; `function_notes.py` records what each of their threads runs.
Each walk is repeated in steady state. Of its repetitions, only the half that entered the fewest
files counts, and its files are those that more than half of these enter. This leaves out what
sometimes happens at the same time, such as a renewed announcement, also on a busy machine. Calls
that are made whenever the swarm is idle, those of periodic tasks, do not count.

The walks use the Python interface alone, so that trees with different files can be compared. With
the folder TREE/.typing in front of `tests/parts` in PYTHONPATH, another tree is traced, if its
modules and ours have the same names where `warm_python.py` imports them. It needs its C kernels, or
files of the kernels in torch are entered.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import function_notes
import warm_python
from function_notes import Note

DECODE, GRADIENT, ANNOUNCEMENT = WALKS = ("decode step", "gradient", "announcement")
_IDLE = "idle"

_NUM_TOKENS = 24
_NUM_GRADIENTS = 24
_NUM_ANNOUNCEMENTS = 16
_NUM_WARM_UPS = 3
"""Repetitions that are not counted: connections are opened and speeds measured in them."""

_SETTLING_SECONDS = 0.02
"""How long a step continues after its result arrived, for the cleanup at the peers."""

_IDLE_SECONDS = 1.5
"""Twice the period of any task that runs more often than peers announce themselves, on a busy
machine as well."""

_QUIET_SECONDS = 100.0
"""Announcement period of the peers that compute: hardly any announcement meets a step."""

_ANNOUNCE_SECONDS = 0.5
"""Announcement period of the peer whose announcements are traced. In 20 periods, longer than all
of this walk takes, it measures the way to each peer once."""

_LEAVING_SECONDS = 30.0
"""How long that peer may take to leave, on a busy machine."""

_ANNOUNCING_PROGRAM = (
    "import runpy, sys;"
    f"sys.argv += ['--announce-period', '{_ANNOUNCE_SECONDS}'];"
    "runpy.run_module('shoal.cli', run_name='__main__', alter_sys=True)"
)


class Where(NamedTuple):
    """The thread that was the first to enter a file."""

    process: int
    thread: int


@dataclass(frozen=True)
class Walk:
    """The files that each repetition entered, in the order of first entry in any process."""

    steps: Sequence[Mapping[str, Where]]

    @property
    def files(self) -> list[str]:
        """The files that more than half of the repetitions entered, in the usual order."""
        places: dict[str, list[int]] = {}
        for step in self.steps:
            for place, file in enumerate(step):
                places.setdefault(file, []).append(place)
        usual = [file for file, found in places.items() if 2 * len(found) > len(self.steps)]
        return sorted(usual, key=lambda file: median(places[file]))

    def is_before(self, first: str, second: str) -> bool:
        """Return whether every repetition that entered both files entered `first` before `second`.

        False also where two threads of a process entered them: either of them may be the faster.
        """
        for step in self.steps:
            if first in step and second in step:
                one, other, files = step[first], step[second], list(step)
                is_race = one.process == other.process and one.thread != other.thread
                if is_race or files.index(first) > files.index(second):
                    return False
        return True


def trace_walks() -> dict[str, Walk]:
    """Return what the walks enter in the tree that is installed."""
    spec = importlib.util.find_spec("shoal.client")
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).resolve().parents[1]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        process = warm_python.run(
            [sys.executable, "-P", "-m", "entered_files", "--take", str(root)],
            starts_peers=True,
            env=function_notes.prepare(root, folder),
            capture_output=True,
            text=True,
        )
        assert process.returncode == 0, process.stderr
        steps = json.loads(process.stdout.splitlines()[-1])
        return sort_notes(list(function_notes.read_notes(folder)), steps)


def sort_notes(notes: Sequence[Note], steps: dict[str, list[int]]) -> dict[str, Walk]:
    """Return the walks, given the numbers of their steps and of those when the swarm was idle."""
    calls = [{note.call for note in notes if note.step == step} for step in steps[_IDLE]]
    background = set.intersection(*calls)
    entered: dict[int, dict[str, Where]] = {}
    for note in sorted(notes, key=lambda note: note.nanoseconds):
        if note.call not in background:
            where = Where(note.process, note.thread)
            entered.setdefault(note.step, {}).setdefault(note.file, where)
    walks = {walk: [entered.get(step, {}) for step in steps[walk]] for walk in WALKS}
    return {walk: Walk(leave_out_disturbed(found)) for walk, found in walks.items()}


def leave_out_disturbed(
    steps: Sequence[Mapping[str, Where]],
) -> list[Mapping[str, Where]]:
    """Return the half of some steps that entered the fewest files, in order.

    On a busy machine steps take long, and many meet what the swarm does in the background.
    """
    fewest = sorted(range(len(steps)), key=lambda number: len(steps[number]))
    return [steps[number] for number in sorted(fewest[: len(steps) // 2])]


class Steps:
    """Tells all processes which step is current."""

    def __init__(self) -> None:
        self._mark = function_notes.open_mark()
        self._last = 0
        self.taken: dict[str, list[int]] = {walk: [] for walk in (*WALKS, _IDLE)}

    def begin(self, walk: str) -> None:
        self._last += 1
        self.taken[walk].append(self._last)
        self._mark[0] = self._last

    def end(self) -> None:
        time.sleep(_SETTLING_SECONDS)
        self._mark[0] = 0

    @contextlib.contextmanager
    def step(self, walk: str) -> Iterator[None]:
        self.begin(walk)
        yield
        self.end()


class TokenSteps:
    """A streamer for `generate` that begins a step with each token."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    def put(self, value: object) -> None:
        self._steps.end()
        self._steps.begin(DECODE)

    def end(self) -> None:
        self._steps.end()


def take_walks(root: Path) -> dict[str, list[int]]:
    """Take all walks and return the numbers of their steps.

    Imports stand in here: they are for the traced process, not for the one that starts it.
    """
    from shoal.client import AutoDistributedModelForCausalLM
    from shoal.peer.local_swarm.swarm import LocalSwarm

    steps, path = Steps(), str(root / "models" / "shoal-stories")
    with (
        LocalSwarm(path, [(0, 4), (4, 8)], announce_period_seconds=_QUIET_SECONDS) as swarm,
        AutoDistributedModelForCausalLM.from_pretrained(
            path, initial_peers=swarm.initial_peers
        ) as model,
    ):
        wait_idly(steps)
        # First: ten seconds after the other walks, peers close connections that these opened.
        announcing = swarm.add((0, 4), program=("-c", _ANNOUNCING_PROGRAM))
        take_announcements(model, steps)
        announcing.terminate()
        announcing.wait(_LEAVING_SECONDS)
        wait_idly(steps)
        take_tokens(model, steps)
        wait_idly(steps)
        take_gradients(model, steps)
    return steps.taken


def wait_idly(steps: Steps) -> None:
    """Take a step of doing nothing, in which the swarm may still clean up after the last one."""
    with steps.step(_IDLE):
        time.sleep(_IDLE_SECONDS)


def take_tokens(model: Any, steps: Steps) -> None:
    """Generate; a step is all that happens from one token to the next."""
    import torch

    num_tokens = _NUM_WARM_UPS + _NUM_TOKENS + 1
    model.generate(
        torch.arange(100, 108)[None],
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        streamer=TokenSteps(steps),
    )
    # No token follows the last one.
    steps.taken[DECODE] = steps.taken[DECODE][-1 - _NUM_TOKENS : -1]


def take_gradients(model: Any, steps: Steps) -> None:
    """Fine-tune an adapter; a step is forward and backward after an update of its weights."""
    import torch

    from shoal.client import LoraAdapter

    tokens = torch.arange(100, 108)[None]
    adapter = LoraAdapter.create(model, rank=4)
    optimizer = torch.optim.AdamW(adapter.parameters(), lr=1e-3)
    for _ in range(_NUM_WARM_UPS + _NUM_GRADIENTS):
        with steps.step(GRADIENT):
            model(tokens, labels=tokens, active_adapter=adapter).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    del steps.taken[GRADIENT][:_NUM_WARM_UPS]


def take_announcements(model: Any, steps: Steps) -> None:
    """Wait until a peer has announced itself once more, and read who serves what."""
    for _ in range(_NUM_WARM_UPS + _NUM_ANNOUNCEMENTS):
        with steps.step(ANNOUNCEMENT):
            time.sleep(1.5 * _ANNOUNCE_SECONDS)
            model.transformer.h.sequence_manager.update()
    del steps.taken[ANNOUNCEMENT][:_NUM_WARM_UPS]


def main() -> None:
    parser = argparse.ArgumentParser(description="List the product files that three walks enter.")
    parser.add_argument("--take", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.take:
        print(json.dumps(take_walks(options.take)))
        return
    for name, walk in trace_walks().items():
        print(f"{name}: {len(walk.files)} files", *walk.files, sep="\n    ")


if __name__ == "__main__":
    main()
