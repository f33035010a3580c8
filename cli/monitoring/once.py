"""`shoal monitor --once`: the state of a swarm on the terminal, and as the exit code."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from ...protocol.ids import ModelId
from ..options.join_options import Joining
from ..terminal.heavy_imports import importing_much
from ..terminal.interrupts import quitting_at_once
from ..terminal.terminal import Progress, Terminal
from .watching_options import make_canaries

if TYPE_CHECKING:
    from ...client.monitor.canary import CanaryProcess, CanaryState
    from ...client.monitor.collector import SwarmAccess
    from ...client.monitor.state import SwarmState


def run_once(options: argparse.Namespace, joining: Joining) -> int:
    """Print the state of a swarm and return what it means as the exit code."""
    with Progress(Terminal(sys.stderr), lambda: "Asking the swarm"):
        with quitting_at_once(options.json), importing_much():
            from ...client.monitor.access import make_access
            from ...client.monitor.description import describe, describe_canaries
            from .health_table import show_health

        access = make_access(joining.membership)
        canaries = make_canaries(options.canaries, joining, access.clock)
        state, states = asyncio.run(_look(access, joining.addresses, options.models, canaries))
    now = access.clock.wall()
    described = replace(describe(state, now), canaries=describe_canaries(states, now))
    terminal = Terminal(sys.stdout)
    if options.json:
        facts = asdict(described)
        del facts["events"]  # there is no history
        terminal.print_json(facts)
    else:
        show_health(described, terminal)
    return described.exit_code


async def _look(
    access: SwarmAccess,
    addresses: Sequence[str],
    models: Sequence[ModelId],
    canaries: Sequence[CanaryProcess],
) -> tuple[SwarmState, list[CanaryState]]:
    """Return the state of the swarm, and what each canary says, one after the other."""
    from ...client.monitor.canary import CanaryState, reduce_run
    from ...client.monitor.collector import look_once

    state = await look_once(access, addresses, models)
    states = list[CanaryState]()
    for canary in canaries:
        states.append(reduce_run(CanaryState(canary.name), await canary.run(), 0)[0])
        await canary.close()
    return state, states
