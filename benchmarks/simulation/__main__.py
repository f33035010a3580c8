"""A swarm that runs itself, in simulated time: placement and routing against their figures.

    make bench BENCHMARKS=simulation ARGS="churn --peers 300"

The decisions are those of `peer/placement/placement.py` and `client/routing/router.py`, and of
`protocol/runs/update_parts.py` in `pipeline`. Everything follows from the seed; how fast this
machine is makes no difference.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from measuring.program import run_program
from shoal.cli.options.quantities import parse_count, parse_non_negative
from simulation.distances import Chosen, run_distances, time_decisions
from simulation.machines import read_churn
from simulation.pipeline import compare_delays, compare_wirings
from simulation.plot import TARGET_RATIO, draw_outcome
from simulation.scenarios import (
    ChurnOutcome,
    ChurnSetting,
    Recovery,
    run_churn,
    run_halves,
    run_recovery,
    run_small,
    run_storm,
)
from simulation.steps import reproduce_published
from simulation.traffic import run_traffic
from simulation.world import WorldConfig

PERIOD_SECONDS = WorldConfig().period_seconds

TARGET_PEERS = 1000
"""Smaller swarms have less to choose from, and may miss targets that are for so many peers."""

_LEAST_HOURS = 0.01
"""A shorter time has no sample of the swarm."""


@dataclass
class Run:
    """The options of one call, and what came out so far."""

    options: argparse.Namespace
    figures: dict[str, Any] = field(default_factory=dict)
    missed: list[str] = field(default_factory=list)
    churn: ChurnOutcome | None = None
    recoveries: list[Recovery] = field(default_factory=list)

    def check(self, name: str, value: float, is_reached: bool, target: str) -> None:
        """Print a figure beside its target."""
        print(f"  {name}: {value:.3g}  (target {target}{'' if is_reached else ', MISSED'})")
        if not is_reached:
            self.missed.append(name)


def simulate_churn(run: Run) -> None:
    """Print what happens while peers come and go, honest ones or by a trace."""
    options = run.options
    setting = ChurnSetting(options.peers, options.hours, options.churn, seed=options.seed)
    trace = None if options.trace is None else read_churn(options.trace)
    run.churn = run_churn(setting, trace)
    run.figures["churn"] = check_churn(run, run.churn)


def simulate_liars(run: Run) -> None:
    """Print the same for a swarm in which one of ten boasts."""
    options = run.options
    setting = ChurnSetting(
        options.peers, options.hours / 2, options.churn, liars=0.1, seed=options.seed
    )
    outcome = run_churn(setting)
    figures = outcome.summarize()
    run.figures["liars"] = figures
    print(f"  true speed of the weakest block, least: {figures['least_ratio']:.3f} of the optimum")
    run.check("replicas, least", figures["min_replicas"], figures["min_replicas"] >= 2, ">= 2")


def check_churn(run: Run, outcome: ChurnOutcome) -> dict[str, float]:
    """Print the figures of churn beside their targets."""
    figures = outcome.summarize()
    least, moves = figures["least_ratio"], figures["moves_per_peer_and_hour"]
    run.check("weakest block, least part of the optimum", least, least >= TARGET_RATIO, ">= 0.85")
    print(f"  weakest block, mean part of the optimum: {figures['mean_ratio']:.3f}")
    run.check("replicas, least", figures["min_replicas"], figures["min_replicas"] >= 2, ">= 2")
    run.check("moves per peer and hour", moves, moves <= 1, "<= 1")
    print(f"  dials before moves, per peer and hour: {figures['dials_per_peer_and_hour']:.2f}")
    most = figures["most_moves_of_a_peer_in_an_hour"]
    print(f"  moves of the most restless peer in an hour: {most:.0f}")
    run.check("moves back within an hour", figures["returns"], figures["returns"] == 0, "0")
    late = figures["moves_in_quiet_half_hour"]
    run.check("moves once nobody comes or goes", late, late == 0, "0")
    return figures


def simulate_storm(run: Run) -> None:
    """Print how a swarm comes back after half of the hosts of a quarter of the blocks died."""
    outcome = run_storm(run.options.seed, run.options.peers)
    ratios = {minutes: outcome.find_ratio(minutes) for minutes in (1, 5, 10, 20, 60)}
    print("  minutes after: " + ", ".join(f"{m}: {ratio:.3f}" for m, ratio in ratios.items()))
    moves = outcome.moves_per_peer_and_hour
    run.check("moves per peer in that hour", moves, moves <= 1, "<= 1")
    run.check("after 20 minutes", ratios[20], ratios[20] >= TARGET_RATIO, ">= 0.85")
    run.figures["storm"] = {"ratios": ratios, "moves_per_peer_and_hour": moves}


def simulate_halves(run: Run) -> None:
    """Print whether blocks stay served half of whose hosts are killed every minute."""
    seeds = range(run.options.seed, run.options.seed + 20)
    outcomes = [run_halves(seed, min(40, run.options.peers)) for seed in seeds]
    num_killed = mean(outcome.num_killed for outcome in outcomes)
    print(f"  killed in ten minutes: {num_killed:.1f} of {outcomes[0].num_peers} peers, on average")
    print(f"  moves: {sum(o.num_moves for o in outcomes)} in {len(outcomes)} swarms")
    below = max(outcome.seconds_below_floor for outcome in outcomes)
    print(f"  longest with fewer than two hosts of a block: {below:.0f} s")
    num_gaps = sum(outcome.num_gaps for outcome in outcomes)
    run.check("blocks that nobody served for a while", num_gaps, num_gaps == 0, "0")
    run.figures["halves"] = [asdict(outcome) for outcome in outcomes]


def simulate_recovery(run: Run) -> None:
    """Print how long a span stays open whose only host died."""
    for num_spare in (2, 3, 8, 40):
        seeds = range(run.options.seed, run.options.seed + 25)
        run.recoveries += [run_recovery(seed, num_spare) for seed in seeds]
    periods = [(r.total_seconds - r.load_seconds) / PERIOD_SECONDS for r in run.recoveries]
    print(f"  median of {len(periods)}: {median(periods):.2f} announcement periods and loading")
    run.check("longest", max(periods), max(periods) <= 2, "<= 2 periods and loading")
    run.figures["recovery"] = {"median_periods": median(periods), "most_periods": max(periods)}


def simulate_small(run: Run) -> None:
    """Print what peers reach by themselves in small swarms, beside a full search."""
    outcomes = [run_small(seed) for seed in range(run.options.seed, run.options.seed + 20)]
    same = [outcome.steps_per_second / outcome.best_steps_per_second for outcome in outcomes]
    free = [outcome.steps_per_second / outcome.best_of_any_length for outcome in outcomes]
    lacking = sum(outcome.replicas < outcome.best_replicas for outcome in outcomes)
    print(f"  of the best placement: median {median(same):.2f}, mean {mean(same):.2f}, "
          f"least {min(same):.2f}")  # fmt: skip
    print(f"  of the best one with shorter spans as well: median {median(free):.2f}")
    run.check("swarms with fewer replicas than possible", lacking, lacking == 0, "0")
    run.figures["small"] = [asdict(outcome) for outcome in outcomes]


def simulate_published(run: Run) -> None:
    """Print a published table beside what the simulator makes of it."""
    run.figures["published"] = []
    for row, speed in reproduce_published():
        print(f"  {row.num_hops:2} hops, {row.bits_per_second / 1e6:4.0f} Mbit/s, "
              f"{1000 * row.rtt_seconds:5.1f} ms: {speed:.2f} steps/s "
              f"(published {row.steps_per_second:.2f})")  # fmt: skip
        run.figures["published"].append(asdict(row) | {"simulated": speed})


def simulate_traffic(run: Run) -> None:
    """Print what sessions get that are routed without knowing of each other."""
    counts = [1, 10, 100, 1000]
    outcomes = run_traffic(run.options.seed, min(300, run.options.peers), counts)
    for outcome in outcomes:
        print(f"  {outcome.num_sessions:4} sessions: {outcome.steps_per_second:7.1f} steps/s, "
              f"{outcome.steps_per_second / outcome.optimum:.2f} of the bound, median step "
              f"{1000 * outcome.median_step_seconds:.0f} ms, {outcome.mean_hops:.1f} hops"
              )  # fmt: skip
    run.figures["traffic"] = [asdict(outcome) for outcome in outcomes]


def simulate_distances(run: Run) -> None:
    """Print what a step takes over peers in five regions, by what the client knows."""
    run.figures["distances"] = {}
    for num_peers in (60, 300):
        outcomes = run_distances(run.options.seed, num_peers, 100, [8, 32, num_peers])
        print(f"  {num_peers} peers, best of all chains: "
              f"{1000 * outcomes[0].optimum_seconds:.0f} ms")  # fmt: skip
        for outcome in outcomes:
            print(f"    {outcome.num_measured} of them measured by the client: "
                  f"by its round trips {_show_chosen(outcome.by_round_trips)}, "
                  f"by the ways between peers {_show_chosen(outcome.by_ways)}")  # fmt: skip
        run.figures["distances"][num_peers] = [asdict(outcome) for outcome in outcomes]


def _show_chosen(chosen: Chosen) -> str:
    return (
        f"{1000 * chosen.median_step_seconds:.0f} ms (optimum + {100 * chosen.above_optimum:.0f} %)"
    )


def simulate_decisions(run: Run) -> None:
    """Print what choosing a route takes over ten thousand peers, which is real time."""
    times = time_decisions(run.options.seed, 10_000, 80, num_calls=40)
    for name, seconds in asdict(times).items():
        run.check(f"{name}, ms", 1000 * seconds, seconds <= 0.02, "<= 20")
    run.figures["decisions"] = asdict(times)


def simulate_pipeline(run: Run) -> None:
    """Print how fast training runs compute their updates, by how parts are ordered."""
    print("  speed as a share of what the slowest stage could do: 4 stages, 64 parts,")
    print("  members and passes vary by 20 %, a slow member takes three times as long")
    tables = {"wirings": compare_wirings(run.options.seed)}
    tables["delays, in times of a part"] = compare_delays(run.options.seed)
    for title, table in tables.items():
        columns = next(iter(table.values()))
        print(f"  {title:<26}" + "".join(f"{column:>13}" for column in columns))
        for name, shares in table.items():
            print(f"    {name:<24}" + "".join(f"{100 * one:>11.0f} %" for one in shares.values()))
    run.figures["pipeline"] = tables


def simulate_large(run: Run) -> None:
    """Print the figures of churn for ten thousand peers."""
    setting = ChurnSetting(10_000, 0.25, run.options.churn, quiet_hours=0.1, seed=run.options.seed)
    outcome = run_churn(setting, config=replace(WorldConfig(), view_seconds=6.0))
    run.figures["large"] = check_churn(run, outcome)


SCENARIOS: dict[str, Callable[[Run], None]] = {
    "published": simulate_published,
    "small": simulate_small,
    "recovery": simulate_recovery,
    "churn": simulate_churn,
    "storm": simulate_storm,
    "halves": simulate_halves,
    "liars": simulate_liars,
    "traffic": simulate_traffic,
    "distances": simulate_distances,
    "decisions": simulate_decisions,
    "pipeline": simulate_pipeline,
    "large": simulate_large,
}


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "scenarios", nargs="*", choices=[[], *SCENARIOS], help=f"of {', '.join(SCENARIOS)}"
    )
    parser.add_argument(
        "--peers", type=parse_count, default=TARGET_PEERS, metavar="N",
        help="default: %(default)s, for which the targets are",
    )  # fmt: skip
    parser.add_argument(
        "--hours", type=_parse_hours, default=2.0, help="of churn (default: %(default)s)"
    )
    parser.add_argument(
        "--churn", type=parse_non_negative, default=0.3, help="part replaced in an hour"
    )
    parser.add_argument("--trace", type=Path, help="lines of `seconds,join|leave|kill,name`")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="draw churn and recovery")
    parser.add_argument("--json", type=_parse_file, metavar="FILE", help="write all figures")
    return parser.parse_args()


def _parse_hours(text: str) -> float:
    hours = parse_non_negative(text)
    if hours < _LEAST_HOURS:
        raise argparse.ArgumentTypeError(f"{text} is too short; {_LEAST_HOURS:g} is the least")
    return hours


def _parse_file(text: str) -> Path:
    """Refuse a file that cannot be written, before minutes of computing."""
    path = Path(text)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path} cannot be written")
    return path


def main() -> int:
    """Run the scenarios; return how many targets were missed."""
    options = read_options()
    run = Run(options)
    for name in options.scenarios or SCENARIOS:
        print(f"{name} (seed {options.seed})")
        began_at = time.perf_counter()
        SCENARIOS[name](run)
        print(f"  simulated in {time.perf_counter() - began_at:.0f} s")
    if options.plot is not None and run.churn is not None and run.recoveries:
        draw_outcome(run.churn, run.recoveries, PERIOD_SECONDS, options.plot)
    if options.json is not None:
        options.json.write_text(json.dumps(run.figures, indent=2), encoding="utf-8")
    if run.missed and options.peers != TARGET_PEERS:
        print(f"The targets are for {TARGET_PEERS} peers, not for {options.peers}.")
    return len(run.missed)


if __name__ == "__main__":
    run_program(main)
