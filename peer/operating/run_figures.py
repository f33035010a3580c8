"""How a training run goes that a peer takes part in, read from what the peer reports of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from ..process.config import PeerEvent

COUNTED: tuple[str, ...] = (
    "member_joined", "member_left", "put_aside", "too_slow", "replicas_differ", "begun_again",
)  # fmt: skip
"""The events of a run that are counted, by name."""


class RunFigures:
    """Figures of the run that a peer takes part in, from the events of `TrainingLoop`; empty until
    it takes part in one.
    """

    def __init__(self) -> None:
        self.described: Mapping[str, Any] = {}
        """Which run it is; empty: none, or none any more."""
        self.newest: Mapping[str, Any] = {}
        """The last update that was applied here; empty before the peer holds a stage."""
        self.members_per_stage: Sequence[int] = ()
        self.held_out_loss: float | None = None
        self.num_averaged = 0
        """Updates whose gradients this peer has averaged, or would have."""
        self.averaging_seconds = 0.0
        """How long that took, all of them together."""
        self.num_parts_redone = 0
        """Parts of these that were counted, lost, and computed again."""
        self.num_events = dict.fromkeys(COUNTED, 0)

    def note(self, event: PeerEvent) -> None:
        """Take an event of the peer; those of anything else are passed over."""
        facts = cast(dict[str, Any], event.facts)
        if event.name in self.num_events:
            self.num_events[event.name] += 1
        if event.name in ("online", "training") and "run_id" in facts:
            self.described = facts
        elif event.name == "training_stopped":
            self.described = self.newest = {}
        elif event.name == "held_out":
            self.held_out_loss = facts["loss"]
        elif event.name == "update":
            if facts["update"] > self.newest.get("update", 0):  # not the state of one, once more
                self.num_averaged += 1
                self.averaging_seconds += facts["averaging_seconds"]
                self.num_parts_redone += facts["parts_redone"]
            self.newest = facts
        self.members_per_stage = facts.get("members_per_stage", self.members_per_stage)

    @property
    def progress(self) -> dict[str, Any]:
        """Return `run`, how far it has come, for people; nothing where there is none."""
        if not self.newest:
            return {}
        told = {name: self.described[name] for name in ("name", "num_updates")}
        return {"run": told | {name: self.newest[name] for name in ("update", "loss")}}
