"""What kills cost a training run: every 20 s a member is killed, and started again at once.

    make bench BENCHMARKS=training_benchmarks.kills
    make bench BENCHMARKS=training_benchmarks.kills ARGS="--replicas 2 --updates 200"
    make bench BENCHMARKS=training_benchmarks.kills ARGS="--cores 0"

The same run is trained twice over real processes, first without kills, and then once more in one
process. Equal weights show that no part was lost, and none counted twice; this ends with another
exit code than 0 where they differ. With `--without U:I`, the one process leaves part I of update U
out, to show that. The last member of a stage is never killed.

A part that is computed again at one stage counts as one. It was in flight at the member that was
killed, or counted by it in the update that was under way, as nobody else had its gradients.

All members together get `--cores`, each an equal share in a control group of Linux: so those that
are left are no faster than before. This needs root; `--cores 0` leaves it out, and goodput says
nothing then. The capacity is the smallest share of its members that a stage has left. A member that
starts is counted: what it imports and the state that it fetches are a loss. The second figure of
goodput counts it from its first update on.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from measuring.program import run_program
from measuring.report import TargetFigure, at_least, at_most
from shoal.cli.benchmarking.figure import Figure, describe_machine
from shoal.models.token_shards import TokenShards
from shoal.peer.engine.training.whole_run import WholeRun
from shoal.protocol.errors import UsageError
from shoal.protocol.runs.training_run import PartId, TrainingRun
from training_benchmarks.cpu_quotas import CpuQuotas
from training_benchmarks.members import (
    Event,
    Member,
    MemberSettings,
    RunSizes,
    find_addresses,
    start_members,
    write_run,
)

DIFFERENT = 3
"""The exit code where the weights differ."""

_NUM_STAGES = 2
_LOOK_SECONDS = 0.1
_BEGINNING = ("PartPasses.run_forward", "PartPasses.run_loss")
"""The first that each stage computes of a part: once if nobody is killed."""

_COUNTING = ("PartPasses.run_backward", "PartPasses.run_loss")
"""The last that each stage computes of a part, which is counted then."""

_DISCOUNTING = ("PartPasses.discount",)


class Life(NamedTuple):
    """From when to when a stage had a member."""

    stage: int
    begun_at: float
    ended_at: float


def integrate_capacity(
    lives: Sequence[Life], num_replicas: int, start: float, stop: float
) -> float:
    """Return the seconds of full capacity between two times: the scarcest stage decides.

    >>> lives = [Life(0, 0, 9), Life(0, 0, 4), Life(1, 0, 9), Life(1, 0, 2), Life(1, 3, 9)]
    >>> integrate_capacity(lives, 2, 0, 6)
    4.5
    """
    times = {time for life in lives for time in life[1:] if start < time < stop}
    borders = sorted({start, stop} | times)
    total = 0.0
    for begin, end in itertools.pairwise(borders):
        living = Counter(life.stage for life in lives if life.begun_at <= begin < life.ended_at)
        total += (end - begin) * min(living[stage] for stage in range(_NUM_STAGES)) / num_replicas
    return total


class StagePart(NamedTuple):
    """A part of an update at one stage."""

    stage: int
    update: int
    part: int


class Work(NamedTuple):
    """The parts that a member has begun to compute, and those that it has counted."""

    begun: Sequence[StagePart]
    counted: Sequence[StagePart]
    lost_from: int | None = None
    """The update that was under way when the member was killed; None: it was not."""


class Redone(NamedTuple):
    """How many parts were computed again."""

    counted: int
    """They were counted by members that were killed."""
    in_flight: int
    """They were in flight at members that were killed."""
    twice: int
    """No kill had lost what was computed of them."""


def count_redone(works: Sequence[Work]) -> Redone:
    """Return how many parts were computed again at their stages, and why.

    >>> one, other = StagePart(0, 7, 0), StagePart(0, 7, 1)
    >>> killed, living = Work([one, other], [one], lost_from=7), Work([other, one], [other, one])
    >>> count_redone([killed, living])
    Redone(counted=1, in_flight=1, twice=0)
    >>> count_redone([killed._replace(lost_from=8), living])
    Redone(counted=0, in_flight=0, twice=2)
    """
    again = Counter(part for work in works for part in work.begun)
    again.subtract(list(again))
    num_counted = num_in_flight = 0
    for work in works:
        for part in set(work.begun):
            if work.lost_from is not None and part.update >= work.lost_from and again[part]:
                again[part] -= 1
                num_counted += part in work.counted
                num_in_flight += part not in work.counted
    return Redone(num_counted, num_in_flight, again.total())


@dataclass(frozen=True)
class Trained:
    """What came of a run."""

    num_replicas: int
    members: list[Member]
    """All that ever lived."""
    num_kills: int
    digests: set[str]

    def list_updates(self) -> dict[int, float]:
        """Return when each update was over, from the first one on that had all members."""
        whole = [self.num_replicas] * _NUM_STAGES
        told = [event for member in self.members for event in _list_updates(member)]
        told.sort(key=lambda event: event.at)
        later = itertools.dropwhile(lambda event: event.facts["members_per_stage"] != whole, told)
        times: dict[int, float] = {}
        for event in later:
            times.setdefault(event.facts["update"], event.at)
        return times

    def list_lives(self, *, from_first_update: bool) -> list[Life]:
        """Return when members lived."""
        lives: list[Life] = []
        for member in self.members:
            begun_at, ended_at = member.started_at, member.ended_at or float("inf")
            if from_first_update:
                updates = _list_updates(member)
                begun_at = updates[0].at if updates else ended_at
            lives.append(Life(member.stage, begun_at, ended_at))
        return lives

    def compute_rate(self, *, from_first_update: bool = False) -> float:
        """Return the updates per second of full capacity."""
        times = self.list_updates()
        start, stop = times[min(times)], times[max(times)]
        lives = self.list_lives(from_first_update=from_first_update)
        seconds = integrate_capacity(lives, self.num_replicas, start, stop)
        return (max(times) - min(times)) / seconds

    def count_redone(self) -> Redone:
        """Return how many parts were computed again."""
        works: list[Work] = []
        for member in self.members:
            over = [event.facts["update"] for event in _list_updates(member)]
            lost_from = None if _is_living(member) else max(over, default=0)
            begun, counted = _list_parts(member, _BEGINNING), _list_parts(member, _COUNTING)
            works.append(Work(begun, counted, lost_from))
        return count_redone(works)

    def count_discounted(self) -> int:
        """Return how many parts were taken out of sums, as a mate had counted them, too."""
        return sum(len(_list_parts(member, _DISCOUNTING)) for member in self.members)


class Killer:
    """Kills members, and starts them again."""

    def __init__(self, members: list[Member], stack: ExitStack, seed: int, seconds: float) -> None:
        self.num_kills = 0
        self._members = members
        self._stack = stack
        self._rng = random.Random(seed)
        self._seconds = seconds
        self._next_at = time.perf_counter() + seconds

    def kill_when_due(self) -> bool:
        """Kill a member that is not the last one of its stage, if it is time to; return whether."""
        training = [each for each in self._members if _is_living(each) and _has_joined(each)]
        stages = [member.stage for member in training]
        spare = [member for member in training if stages.count(member.stage) > 1]
        if time.perf_counter() < self._next_at or not spare:
            return False
        victim = self._rng.choice(spare)
        victim.kill()
        others = [member for member in training if member is not victim]
        addresses = [address for member in others for address in find_addresses(member)]
        settings = replace(victim.settings, addresses=addresses)
        self._members.append(Member(settings, victim.inside))
        self._stack.callback(self._members[-1].close)
        self.num_kills += 1
        self._next_at = time.perf_counter() + self._seconds
        return True


def _is_living(member: Member) -> bool:
    return member.ended_at is None


def _list_updates(member: Member) -> list[Event]:
    return member.list_events("update")


def _list_parts(member: Member, what: Sequence[str]) -> list[StagePart]:
    """Return the parts of which a member has computed one of these, as often as it has."""
    computed = (event.facts for event in member.list_events("computed"))
    return [
        StagePart(member.stage, facts["update"], facts["index"])
        for facts in computed
        if facts["what"] in what
    ]


def _has_joined(member: Member) -> bool:
    return bool(_list_updates(member))


def train(
    folder: Path, num_replicas: int, num_cores: float, seed: int, kill_seconds: float | None
) -> Trained:
    """Train the run of a folder; without `kill_seconds`, nobody is killed."""
    num_members = num_replicas * _NUM_STAGES
    with ExitStack() as stack:
        quotas = stack.enter_context(CpuQuotas()) if num_cores else None
        insides = [
            quotas.make(num_cores / num_members) if quotas else [] for _ in range(num_members)
        ]
        settings = MemberSettings(str(folder), 0, tells_work=True)
        places = [(settings.host, inside) for inside in insides]
        members = start_members(settings, stack, num_replicas, _NUM_STAGES, places)
        for member in members:
            member.wait_for("update")
        killer = None if kill_seconds is None else Killer(members, stack, seed, kill_seconds)
        while not any(member.list_events("trained") for member in members if _is_living(member)):
            time.sleep(_LOOK_SECONDS)
            if killer is not None and killer.kill_when_due():
                done = max(each.facts["update"] for one in members for each in _list_updates(one))
                print(f"kill {killer.num_kills}, {done} updates are over", file=sys.stderr)
        # One that was started again just now may have come too late.
        ending = [member for member in members if _is_living(member) and _has_joined(member)]
        digests = {member.wait_for("trained").facts["digest"] for member in ending}
    return Trained(num_replicas, members, 0 if killer is None else killer.num_kills, digests)


def train_alone(run: TrainingRun, folder: Path, left_out: PartId | None) -> str:
    """Train the run in this process; return the digest of the weights."""
    whole = WholeRun(run)
    shards = TokenShards.open(run.corpus, folder, whole.vocabulary_size)
    for _ in whole.train(shards, set() if left_out is None else {left_out}):
        pass
    return whole.compute_weights_digest()


def compare(run: TrainingRun, quiet: Trained, killed: Trained) -> list[Figure]:
    """Return the figures of a run with kills beside those of one without."""
    num_kills, redone = max(1, killed.num_kills), killed.count_redone()
    per_kill = (redone.counted + redone.twice) / num_kills
    tokens = run.tokens_per_update
    plain, joined = killed.compute_rate(), killed.compute_rate(from_first_update=True)
    rate = quiet.compute_rate()
    return [
        Figure("quiet", rate * tokens, "tok/s"),
        Figure("quiet: parts computed again", quiet.count_redone().twice, ""),
        Figure("kills", killed.num_kills, ""),
        TargetFigure("goodput of living capacity, to quiet", plain / rate, "x", at_least(0.85)),
        Figure("the same from first updates on", joined / rate, "x"),
        TargetFigure("redone per kill, beside those in flight", per_kill, "", at_most(2)),
        Figure("  that killed members had counted", redone.counted / num_kills, ""),
        Figure("  of which no kill had lost anything", redone.twice / num_kills, ""),
        Figure("redone per kill, in flight at the killed member", redone.in_flight / num_kills, ""),
        Figure("parts taken out again", killed.count_discounted(), ""),
    ]


def read_part(text: str) -> PartId:
    """Return a part of the form U:I.

    >>> read_part("3:1")
    PartId(update=3, index=1)
    """
    update, _, index = text.partition(":")
    return PartId(int(update), int(index))


def _read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--updates", type=int, default=150)
    parser.add_argument("--parts", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--cores", type=float, default=1.8)
    parser.add_argument("--kill-every", type=float, default=20.0, metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--without", type=read_part, metavar="U:I")
    options = parser.parse_args()
    if options.replicas < 2:
        parser.error("--replicas: at least 2, as the last member of a stage is not killed")
    return options


def main() -> int:
    """Train the run three times, and print a table; return 0, or DIFFERENT."""
    options = _read_options()
    print(describe_machine())
    print(
        f"{options.updates} updates of {options.parts} parts over {_NUM_STAGES} stages x "
        f"{options.replicas} peers, {options.cores:g} cores in all, a kill every "
        f"{options.kill_every:g} s", flush=True,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sizes = RunSizes(options.updates, options.parts, options.hidden)
        run = write_run(folder, sizes)
        try:
            quiet, killed = (
                train(folder, options.replicas, options.cores, options.seed, kill_seconds)
                for kill_seconds in (None, options.kill_every)
            )
        except UsageError as error:
            sys.exit(f"{error}. Give --cores 0 to train without shares")
        for figure in compare(run, quiet, killed):
            print(figure.to_line(), flush=True)
        alone = train_alone(run, folder, options.without)
    digests = {"one process": {alone}, "quiet": quiet.digests, "with kills": killed.digests}
    for title, found in digests.items():
        print(f"  SHA-256 of the weights, {title:<12} {' and '.join(sorted(found))}")
    are_equal = set[str].union(*digests.values()) == {alone}
    print(f"{'+' if are_equal else '-'} the weights {'are equal' if are_equal else 'differ'}")
    return 0 if are_equal else DIFFERENT


if __name__ == "__main__":
    run_program(main)
