"""A round of averaging among the replicas of a stage, beside hivemind's averager in the same run.

    make bench BENCHMARKS=training_benchmarks.averaging
    make bench BENCHMARKS=training_benchmarks.averaging ARGS="--members 2 --mbits 20"

Members are processes that train a run of one stage of about a million weights, whose parts are
tiny. A round lasts from the first copy of gradients until the last member has the sums of all. Its
floor is what the bytes take that a member has to send: over a line of `--mbits` of its own in a
network namespace (needs root), or over loopback, which all members share. The speed of both is that
of a plain TCP connection, measured before.

End to end is from the last part that is counted until all members begin to apply the average: so it
has the questions who has counted what, and the decision of a majority. With hivemind it is from the
first call of `step` until the last one returns, as many float32 numbers, with matchmaking: by
default, which waits for more peers; the shortest that works; and where it knows the number of
peers, so that a group is complete at once. Members of ours never know.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, get_args

from measuring.helper_process import HelperProcess
from measuring.program import run_program
from measuring.report import TargetFigure, at_least, at_most
from measuring.slow_network import SlowNetwork
from shoal.cli.benchmarking.figure import Figure, describe_machine
from shoal.protocol.errors import UnavailableError, UsageError
from shoal.protocol.runs.training_run import Mode
from shoal.protocol.tensors import WireDtype, compute_num_bytes
from training_benchmarks.bandwidth import Place, measure_bandwidth
from training_benchmarks.members import Member, MemberSettings, RunSizes, start_members, write_run

_NUM_WARM = 2
"""Updates in which members dial each other, and more."""

_MOST_UPDATES = 10_000
"""More than are over before all members are there and were measured."""

_MOST_SECONDS = 300.0
_HIVEMIND_ROUNDS = 3
_NUM_BLOCKS, _VOCABULARY = 5, 64
_BLOCK_NUMBERS = 128 * (128 + 64 + 64 + 128) + 3 * 128 * 384 + 2 * 128
_NUM_NUMBERS = _NUM_BLOCKS * _BLOCK_NUMBERS + _VOCABULARY * 128 + 128
"""Weights of the model."""


class Matchmaking(NamedTuple):
    """How hivemind finds a group."""

    name: str
    least_seconds: float
    request_seconds: float
    """Of a request in it; fewer than the least seconds."""
    knows_size: bool
    """Whether a group is complete as soon as it has all peers that there are."""


_MATCHMAKING = (
    Matchmaking("by default", 5.0, 3.0, False),
    Matchmaking("shortest", 1.0, 0.5, False),
    Matchmaking("number of peers known", 5.0, 3.0, True),
)


@dataclass
class _Round:
    """What one member did for an update."""

    counted_at: float = 0.0
    begun_at: float = 0.0
    averaged_at: float = 0.0
    applying_at: float = 0.0


def list_rounds(member: Member) -> dict[int, _Round]:
    """Return what a member did, by how many updates were over then."""
    rounds: dict[int, _Round] = {}
    current = _Round()
    for name, event in member.events:
        if name == "update":
            if current.applying_at:
                rounds[event.facts["update"]] = current
            current = _Round(current.counted_at)
            continue
        match event.facts.get("what"):
            case "PartPasses.run_loss":
                current.counted_at = event.at
            case "SumAttempt.collect":
                current.begun_at = event.facts["begun_at"]
            case "SumAttempt.summarize":
                current.averaged_at = event.at
            case "_apply":
                current.applying_at = event.facts["begun_at"]
            case _:
                pass
    return rounds


def wait_for_rounds(members: Sequence[Member], num_rounds: int) -> None:
    """Wait until all members have told of so many updates of all of them, and one more."""
    deadline = time.perf_counter() + _MOST_SECONDS
    while True:
        told = [member.list_events("update") for member in members]
        whole = [
            sum(event.facts["members_per_stage"] == [len(members)] for event in each)
            for each in told
        ]
        if min(whole) > num_rounds:
            return
        if time.perf_counter() > deadline:
            raise UnavailableError(f"the members came to {whole} updates of all, not {num_rounds}")
        time.sleep(0.05)


def measure_ours(mode: Mode, places: Sequence[Place], num_rounds: int) -> tuple[float, float]:
    """Return the median seconds of a round, and end to end."""
    num_members = len(places)
    sizes = RunSizes(
        _MOST_UPDATES, num_members, num_blocks=_NUM_BLOCKS, num_stages=1, num_rows=1, num_tokens=8,
        vocabulary_size=_VOCABULARY,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        write_run(Path(name), sizes, mode)
        settings = MemberSettings(name, 0, tells_work=True)
        members = start_members(settings, stack, num_members, 1, places)
        wait_for_rounds(members, num_rounds + _NUM_WARM)
    by_update: dict[int, list[_Round]] = defaultdict(list)
    for member in members:
        for update, own in list_rounds(member).items():
            by_update[update].append(own)
    together = (by_update[update] for update in sorted(by_update))
    whole = [each for each in together if len(each) == num_members][_NUM_WARM:]
    rounds = [max(o.averaged_at for o in each) - min(o.begun_at for o in each) for each in whole]
    all_of_it = [
        max(o.applying_at for o in each) - max(o.counted_at for o in each) for each in whole
    ]
    return statistics.median(rounds), statistics.median(all_of_it)


def measure_hivemind(places: Sequence[Place], matchmaking: Matchmaking, num_rounds: int) -> float:
    """Return the median seconds of a call until all have the average; NaN if it fails."""
    seconds = list[float]()
    with ExitStack() as stack:
        peers = list[HelperProcess]()
        addresses = list[str]()
        for host, inside in places:
            settings = {
                "host": host, "addresses": addresses, "num_numbers": _NUM_NUMBERS,
                "num_members": len(places), "matchmaking_seconds": matchmaking.least_seconds,
                "request_seconds": matchmaking.request_seconds,
                "knows_size": matchmaking.knows_size,
            }  # fmt: skip
            module = "training_benchmarks.hivemind_averager"
            peer = stack.enter_context(HelperProcess(module, json.dumps(settings), inside=inside))
            peers.append(peer)
            addresses = addresses or peer.read()
        for peer in peers[1:]:
            peer.read()
        for _ in range(num_rounds):
            for rank, peer in enumerate(peers):
                peer.tell(str(rank))
            try:
                begun, ended, means = zip(*(peer.read() for peer in peers), strict=True)
            except UnavailableError:
                return math.nan
            if not all(math.isclose(mean, (len(peers) - 1) / 2) for mean in means):
                return math.nan
            seconds.append(max(ended) - min(begun))
    return statistics.median(seconds)


def measure(where: str, places: Sequence[Place], is_shared: bool, num_rounds: int) -> list[Figure]:
    """Measure among members at these places; `is_shared`: they share what was measured."""
    num_members = len(places)
    bandwidth = measure_bandwidth(places[0], places[1])
    title = f"{where}, {num_members} members"
    figures = [Figure(f"{title}: plain TCP", 8e-6 * bandwidth, "Mbit/s")]
    theirs: dict[bool, list[float]] = defaultdict(list)
    for matchmaking in _MATCHMAKING:
        name = f"hivemind, {matchmaking.name}"
        print(f"{title}: {name}", file=sys.stderr)
        found = measure_hivemind(places, matchmaking, _HIVEMIND_ROUNDS)
        figures.append(Figure(f"{name}: end to end", found, "s"))
        theirs[matchmaking.knows_size].append(found)
    # A target is missed where one of them failed: nothing is compared with that.
    known, unknown = (
        math.nan if any(map(math.isnan, each)) else min(each)
        for each in (theirs[True], theirs[False])
    )
    for mode in get_args(Mode):
        print(f"{title}: {mode} mode", file=sys.stderr)
        round_seconds, seconds = measure_ours(mode, places, num_rounds)
        dtype = WireDtype.INT8 if mode == "int8" else WireDtype.FP32
        # Sums are sent in int8 both times, or in 8 bytes and then in 4.
        num_bytes = compute_num_bytes(dtype, 1, 1, _NUM_NUMBERS) * (2 if mode == "int8" else 3)
        sent_bytes = (num_members - 1) / num_members * num_bytes
        floor = sent_bytes * (num_members if is_shared else 1) / bandwidth
        figures += [
            Figure(f"{mode}: floor", floor, "s"),
            TargetFigure(f"{mode}: round", round_seconds, "s", at_most(1.3 * floor + 0.05)),
            Figure(f"{mode}: end to end", seconds, "s"),
            TargetFigure(
                f"{mode}: hivemind, number of peers unknown",
                unknown / seconds,
                "x",
                at_least(10),
            ),
            Figure(f"{mode}: hivemind, number of peers known", known / seconds, "x"),
        ]
    return figures


def main() -> None:
    """Measure on loopback and over slow lines, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--members", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--mbits", type=float, default=100.0)
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    print(describe_machine())
    print(f"{_NUM_NUMBERS} numbers", flush=True)
    for num_members in options.members:
        _print("loopback", [("127.0.0.1", ())] * num_members, True, options.rounds)
    for num_members in options.members:
        try:
            with SlowNetwork(num_members, options.mbits) as network:
                _print(f"{options.mbits:g} Mbit/s", network.places, False, options.rounds)
        except UsageError as error:
            print(f"! not measured: {error}")


def _print(where: str, places: Sequence[Place], is_shared: bool, num_rounds: int) -> None:
    """Print what is measured among members at these places, or why nothing is."""
    try:
        for figure in measure(where, places, is_shared, num_rounds):
            print(figure.to_line(), flush=True)
    except UnavailableError as error:
        print(f"! not measured: {error}", flush=True)


if __name__ == "__main__":
    run_program(main)
