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
_SENTENCES = {
    "waiting_for": "Waiting for {what}.",
    "put_aside": "Peer {peer} was put aside: {why}.",
    "replicas_differ": "Stage {stage}, update {update}: {why}.",
    "begun_again": "The update under way begins again.",
    "too_slow": "Peer {peer} is too slow for stage {stage}: {why}.",
    "member_joined": "Peer {peer} joined stage {stage}.",
    "member_left": "Peer {peer} left stage {stage}.",
    "training_stopped": "The run has stopped here: {why}",
    "leaving": "Leaving after this update. Press Ctrl-C again to leave at once.",
}
"""What is printed of events that take one sentence."""


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
            if "model" not in facts:
                self._print("`shoal export` saves its model while peers stay (--linger).")
            else:
                self._print(
                    f"Model: {facts['model']}", f"SHA-256 of its weights: {facts['digest']}"
                )
        elif event.name in _SENTENCES:
            told = {**facts, "peer": f"…{str(facts.get('peer'))[-8:]}"}
            self._print(_SENTENCES[event.name].format(**told))
        elif event.name not in ("update", "failed"):
            self._print_other(event)

    def _print(self, *lines: str) -> None:
        for line in lines:
            self._terminal.print(line)
