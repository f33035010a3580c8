"""The content of the announcements of a peer that trains."""

from __future__ import annotations

from dataclasses import replace

from ...protocol.net.network import Presence
from ...protocol.records.announcements import (
    MAX_LOSS,
    Announcement,
    PeerState,
    TrainingProgress,
)
from ...protocol.runs.run_record import RunRecord
from ...protocol.spans import Span
from ...protocol.versions import MAX_VERSION, MIN_VERSION, SOFTWARE
from .announcer import LIFETIME_PERIODS
from .self_description import describe_place


class RunDescription:
    """Makes the announcements of a peer of a run. Its owner tells it how far the peer has come."""

    def __init__(
        self, record: RunRecord, num_blocks: int, presence: Presence, period_seconds: float
    ) -> None:
        self._record = record
        self._whole = Span(0, num_blocks)
        self._presence = presence
        self._lifetime_seconds = LIFETIME_PERIODS * period_seconds
        self._span: Span | None = None
        self._progress: TrainingProgress | None = None
        self._held_out_loss: float | None = None

    def note(self, span: Span, update: int, loss: float) -> bool:
        """From now on tell which stage the peer holds and its last update; return whether it is
        another stage.
        """
        is_new, self._span = span != self._span, span
        self._progress = TrainingProgress(
            update, self._record.run.num_updates, _limit(loss), self._held_out_loss
        )
        return is_new

    def note_held_out(self, loss: float) -> None:
        """From now on tell this loss on the held-out text."""
        self._held_out_loss = _limit(loss)
        if self._progress is not None:
            self._progress = replace(self._progress, held_out_loss=self._held_out_loss)

    def describe(self, state: PeerState, sequence: int, now: float) -> Announcement:
        """Return the announcement of this moment; `now` is wall seconds.

        A peer without a stage is JOINING, and announces all blocks.
        """
        if self._span is None and state is PeerState.ONLINE:
            state = PeerState.JOINING
        now = round(now, 3)
        return Announcement(
            peer_id=self._presence.identity.peer_id,
            model_id=self._record.model_id,
            num_blocks=self._whole.stop,
            span=self._span or self._whole,
            state=state,
            **describe_place(self._presence),
            min_version=MIN_VERSION,
            max_version=MAX_VERSION,
            software=SOFTWARE,
            weights="fp32",
            compute_dtype="fp32",
            sequence=sequence,
            issued_at=now,
            expires_at=now + self._lifetime_seconds,
            takes_passes=False,
            model_name=self._record.model_name,
            training=self._progress,
        )


def _limit(loss: float) -> float:
    """A run that diverges goes on, and so does its peer: no announcement may have such a loss."""
    return round(min(max(loss, 0.0), MAX_LOSS), 4)
