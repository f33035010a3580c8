"""Runs over random tokens, and the processes that train them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shoal.models.token_shards import write_shard
from shoal.protocol.identity import Identity
from shoal.protocol.runs.run_record import sign_run
from shoal.protocol.runs.training_run import Mode, TrainingRun, read_run

RECORD = "run.record"
"""The file of the record of a run, which all members read."""

_BUNDLED = Path(__file__).parents[2] / "models" / "shoal-stories" / "config.json"
_IMPORT_PATH = str(Path(__file__).parents[1])
_HEAD_DIM = 32
_MOST_SECONDS = 3600.0
_GOODBYE_SECONDS = 30.0
_LOOK_SECONDS = 0.05


@dataclass(frozen=True)
class RunSizes:
    """The sizes of a run of the bundled architecture."""

    num_updates: int
    num_parts: int
    hidden_size: int = 128
    num_blocks: int = 8
    num_stages: int = 2
    num_rows: int = 4
    num_tokens: int = 128
    vocabulary_size: int | None = None
    """None: that of the bundled model."""


def write_run(folder: Path, sizes: RunSizes, mode: Mode = "exact") -> TrainingRun:
    """Write the corpus and the record of a run."""
    config = json.loads(_BUNDLED.read_text())
    hidden_size, num_blocks = sizes.hidden_size, sizes.num_blocks
    num_heads = hidden_size // _HEAD_DIM
    config |= {"hidden_size": hidden_size, "intermediate_size": 3 * hidden_size}
    config |= {"num_attention_heads": num_heads, "num_key_value_heads": num_heads // 2}
    config |= {"num_hidden_layers": num_blocks}
    config |= {"vocab_size": sizes.vocabulary_size or config["vocab_size"]}
    tokens_per_update = sizes.num_parts * sizes.num_rows * sizes.num_tokens
    num_tokens = min(sizes.num_updates, 20) * tokens_per_update + 1
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config["vocab_size"], (num_tokens,), generator=generator).tolist()
    shard = write_shard(folder / "tokens.bin", tokens, config["vocab_size"])
    stages = range(1, sizes.num_stages)
    run = read_run(
        {
            "name": "benchmark",
            "seed": 0,
            "mode": mode,
            "model": config,
            "stage_borders": [num_blocks * stage // sizes.num_stages for stage in stages],
            "corpus": {"shards": [shard.model_dump()], "sequence_length": sizes.num_tokens},
            "num_updates": sizes.num_updates,
            "parts_per_update": sizes.num_parts,
            "rows_per_part": sizes.num_rows,
            "optimizer": {"name": "adamw", "learning_rate": 0.001},
        }
    )
    (folder / RECORD).write_bytes(sign_run(Identity.generate(), run).document)
    return run


@dataclass(frozen=True)
class MemberSettings:
    """Settings of a process that trains a stage. Without addresses to join, it begins the run."""

    folder: str
    stage: int
    addresses: Sequence[str] = ()
    host: str = "127.0.0.1"
    tells_work: bool = False
    """Whether it tells everything that it computes."""
    keeps_graphs: bool = True
    """Whether it keeps graphs of passes until their gradients come; else it computes them again."""
    silence_seconds: float = 5.0
    linger_seconds: float = 3.0


class Event(NamedTuple):
    """Something that a member has told, and when."""

    at: float
    facts: dict[str, Any]


class Member:
    """A process that trains a stage, and what it has told. `inside` runs its command elsewhere."""

    def __init__(self, settings: MemberSettings, inside: Sequence[str] = ()) -> None:
        self.settings = settings
        self.inside = inside
        self.stage = settings.stage
        self.events: list[tuple[str, Event]] = []
        self.started_at = time.perf_counter()
        self.ended_at: float | None = None
        """When it was killed."""
        command = [sys.executable, "-P", "-m", "training_benchmarks.member"]
        self._process = subprocess.Popen(
            [*inside, *command, json.dumps(asdict(settings))],
            env={**os.environ, "PYTHONPATH": _IMPORT_PATH, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,
        )
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with suppress(json.JSONDecodeError):  # it was killed within the line
                facts = json.loads(line)
                self.events.append((facts.pop("event"), Event(facts.pop("at"), facts)))

    def list_events(self, name: str) -> list[Event]:
        """Return the events of a name so far."""
        return [event for each, event in [*self.events] if each == name]

    def wait_for(self, name: str) -> Event:
        """Return the first event of a name as soon as it has come."""
        deadline = time.perf_counter() + _MOST_SECONDS
        while not (found := self.list_events(name)):
            if self._process.poll() is not None or time.perf_counter() > deadline:
                raise SystemExit(f"a member of stage {self.stage} ended without the event {name}")
            time.sleep(_LOOK_SECONDS)
        return found[0]

    def kill(self) -> None:
        """End it, and what it has started, without a word."""
        self.ended_at = time.perf_counter()
        self._kill_group()

    def close(self) -> None:
        """End the process as the end of this one would, and make sure of it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_GOODBYE_SECONDS)
        self._kill_group()

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reading.join(_GOODBYE_SECONDS)


def start_members(
    settings: MemberSettings,
    stack: ExitStack,
    num_replicas: int,
    num_stages: int = 2,
    places: Sequence[tuple[str, Sequence[str]]] = (),
) -> list[Member]:
    """Start members of all stages; return them, the one that began the run first.

    `places` says for each at which host it listens, and what runs its command there; none: all on
    loopback. They end with the stack.
    """
    stages = [stage for _ in range(num_replicas) for stage in range(num_stages)]
    members: list[Member] = []
    addresses: Sequence[str] = ()
    for index, stage in enumerate(stages):
        host, inside = places[index] if places else (settings.host, ())
        own = replace(settings, stage=stage, addresses=addresses, host=host)
        members.append(Member(own, inside))
        stack.callback(members[-1].close)
        addresses = addresses or find_addresses(members[0])
    return members


def find_addresses(member: Member) -> Sequence[str]:
    """Return where others join through a member, as soon as it is known."""
    return member.wait_for("directory").facts["addresses"]
