"""What a run says in the end, for people."""

from __future__ import annotations

import textwrap

from chaos.plan import CHOSEN
from chaos.run import Outcome


def describe_outcome(outcome: Outcome) -> str:
    """Return a summary in 80 columns."""
    setting, tally = outcome.setting, outcome.tally
    indent = " " * 17
    counts, stall = outcome.counts, tally.longest_stall
    verdict = "FAILED" if outcome.failures else "every answer is as if nothing had happened"
    done = ", ".join(f"{kind} {counts[kind]}" for kind in sorted(set(CHOSEN)))
    attacks = ", ".join(f"{name} {num}" for name, num in sorted(outcome.attacks.items()))
    left_out = f"  left out       {outcome.num_left_out} actions: the swarm was not ready in time"
    return "\n".join(
        [
            f"Chaos of seed {setting.seed}, {setting.weights} weights: {verdict}.",
            "",
            f"  done           {done}",
            *([left_out] if outcome.num_left_out else []),
            *textwrap.wrap(
                attacks, 79, initial_indent="  the stranger   ", subsequent_indent=indent
            ),
            f"  clients        {setting.num_clients}, which joined {tally.num_visits} times",
            f"  generations    {tally.num_texts}, with {tally.num_tokens} tokens",
            f"  failovers      {tally.num_failovers}",
            f"  longest stall  {stall.seconds:.1f} s, behind token {stall.num_tokens} of",
            *textwrap.wrap(stall.context, 79, initial_indent=indent, subsequent_indent=indent),
        ]
    )


def describe_failure(outcome: Outcome) -> str:
    """Return what failed, how it came to it, and how to see it again."""
    setting = outcome.setting
    num_replicas = sum(0 in span for span in setting.spans)
    kind = "" if setting.kind == "mixed" else f" --kind {setting.kind}"
    again = (
        f"make chaos SEED={setting.seed} SECONDS={setting.seconds:g} "
        f'ARGS="--peers {len(setting.spans)} --replicas {num_replicas} '
        f'--clients {setting.num_clients} --weights {setting.weights}{kind}"'
    )
    done = [f"{number:3} {action}" for number, action in enumerate(outcome.done, 1)]
    lines = ["What was done:", *done, "", "What failed:", *outcome.failures]
    return "\n".join([*lines, "", f"The same again: {again}"])
