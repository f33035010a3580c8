"""What happens in a training run, for people."""

from __future__ import annotations

import sys
from typing import cast

from ...peer.process.config import PeerEvent, Report
from ..terminal.peer_events import EventPrinter, print_json
from ..terminal.terminal import Terminal
from .model_folder import describe_held_out_loss

_HEADINGS = "update", "loss", "gradient norm", "tokens/s", "averaging", "queue, ms", "peers"
_LINE = "{:>8}  {:>8}  {:>13}  {:>9}  {:>9}  {:>11}  {:>7}"


def choose_report(is_json: bool) -> Report:
    """Return what prints the events of a run, for programs or for people."""
    return print_json if is_json else RunEventPrinter()


class RunEventPrinter:
    """Prints what happens in a run for people, and by `print_other` what else does."""

    def __init__(self, print_other: Report | None = None) -> None:
        self._print_other = print_other or EventPrinter("", "")
        self._terminal = Terminal(sys.stdout)

    def __call__(self, event: PeerEvent) -> None:
        facts = event.facts
        if event.name in ("online", "training") and "run_id" in facts:
            self._print(f"Training run {facts['name']} of {facts['owner']},")
            self._print(f"id {facts['run_id']}", "")
            self._print(_LINE.format(*_HEADINGS))
        elif event.name == "update" and facts["update"]:
            loss, norm = facts["loss"], facts["gradient_norm"]
            speed = facts["tokens_per_second"]
            peers = "+".join(map(str, cast(list[int], facts["members_per_stage"])))
            averaging = f"{facts['averaging_seconds']:.2f} s"
            waits = cast(list[float], facts["queue_seconds"])
            queues = "+".join(f"{1000 * seconds:.0f}" for seconds in waits)
            numbers = f"{loss:.4f}", f"{norm:.4f}", "-" if speed is None else f"{speed:.0f}"
            if num_redone := facts["parts_redone"]:
                parts = "1 part" if num_redone == 1 else f"{num_redone} parts"
                self._print(f"{parts} of update {facts['update']} had to be computed again.")
            self._print(_LINE.format(facts["update"], *numbers, averaging, queues, peers))
        elif event.name == "held_out":
            loss, entropy = (cast(float, facts[name]) for name in ("loss", "entropy"))
            self._print(describe_held_out_loss(loss, entropy))
        elif event.name == "trained":
            self._print("The run is over.")
            if "model" in facts:
                self._print(f"Model: {facts['model']}")
                self._print(f"SHA-256 of its weights: {facts['digest']}")
        elif event.name == "waiting_for":
            self._print(f"Waiting for {facts['what']}.")
        elif event.name == "put_aside":
            self._print(f"Peer …{str(facts['peer'])[-8:]} was put aside: {facts['why']}.")
        elif event.name == "replicas_differ":
            self._print(f"Stage {facts['stage']}, update {facts['update']}: {facts['why']}.")
        elif event.name == "begun_again":
            self._print("The update under way begins again.")
        elif event.name == "too_slow":
            who = f"Peer …{str(facts['peer'])[-8:]} is too slow for stage {facts['stage']}"
            self._print(f"{who}: {facts['why']}.")
        elif event.name in ("member_joined", "member_left"):
            verb = event.name.partition("_")[2]
            self._print(f"Peer …{str(facts['peer'])[-8:]} {verb} stage {facts['stage']}.")
        elif event.name == "training_stopped":
            self._print(f"The run has stopped here: {facts['why']}")
        elif event.name == "leaving":
            self._print("Leaving after this update. Press Ctrl-C again to leave at once.")
        elif event.name not in ("update", "failed"):
            self._print_other(event)

    def _print(self, *lines: str) -> None:
        for line in lines:
            self._terminal.print(line)
