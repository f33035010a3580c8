"""Fine-tuning as a workload: passes, and the adapters that clients bring and peers train."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ...protocol.messages.fields import Message
from ...protocol.net.clock import Clock
from ...protocol.records.announcements import Announcement
from ..engine.engine import Engine
from ..streams.workload import ClientStream, Compute, Handler, StreamWork, Workload
from .accounts import TrainingAccounts
from .passes import PassStream
from .updates import UpdateStream
from .uploads import UploadStream


class TrainingWorkload(Workload):
    """All passes of a peer, and all adapters that are on their way to it."""

    def __init__(
        self, engine: Engine, compute: Compute, clock: Clock, accounts: TrainingAccounts
    ) -> None:
        self.accounts = accounts
        self._engine = engine
        self._compute = compute
        self._clock = clock
        engine.passes.activations.limit(accounts.budget.kept_bytes)
        compute.limit_passes(accounts.budget.work_bytes)

    @property
    def is_idle(self) -> bool:
        """Whether no pass and no update is there."""
        return not self.accounts.num_running

    def attend(self, stream: ClientStream) -> TrainingStream:
        """See Workload.attend."""
        engine, compute, clock = self._engine, self._compute, self._clock
        return TrainingStream(
            UploadStream(engine, compute, clock, self.accounts, stream),
            PassStream(engine, compute, clock, self.accounts, stream),
            UpdateStream(compute, clock, self.accounts, stream),
        )

    def begin_draining(self) -> None:
        """Take no more passes and adapters; those that are here come to their end."""
        self.accounts.is_draining = True

    def count(self) -> Mapping[str, int]:
        """See Workload.count."""
        return {"passes": self.accounts.num_running}

    async def describe(self, announcement: Announcement) -> Announcement:
        """Add how long passes wait."""
        return replace(announcement, pass_queue_seconds=self._compute.pass_queue_seconds)

    def close(self) -> None:
        """Keep no adapters any more."""
        self.accounts.shelf.close()


class TrainingStream(StreamWork):
    """The fine-tuning messages of one stream."""

    def __init__(self, *parts: UploadStream | PassStream | UpdateStream) -> None:
        """Each part takes some types of messages."""
        self._parts = parts

    @property
    def handlers(self) -> Mapping[type[Message], Handler]:
        """See StreamWork.handlers."""
        return {kind: take for part in self._parts for kind, take in part.handlers.items()}

    @property
    def active_at(self) -> float:
        """See StreamWork.active_at."""
        return max(part.active_at for part in self._parts)

    def end(self) -> None:
        """Drop what nobody waits for any more."""
        for part in self._parts:
            part.end()
