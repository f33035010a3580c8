"""What one stream says for fine-tuning, each to the desk that it is for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ...protocol.fair_share import Holder
from ...protocol.messages.adapters import (
    AdapterFetch,
    AdapterHead,
    AdapterMeasure,
    AdapterPiece,
    AdapterUpdate,
    AdapterWithdrawal,
)
from ...protocol.messages.passes import Pass, PassPiece
from ..sessions.answer_queue import AnswerQueue
from ..sessions.session_prompts import SessionPrompts
from ..training.adapter_desk import AdapterDesk
from ..training.pass_desk import PassDesk
from ..training.update_desk import UpdateDesk

if TYPE_CHECKING:
    from .service import Service

LearningMessage = (
    Pass
    | PassPiece
    | AdapterHead
    | AdapterPiece
    | AdapterWithdrawal
    | AdapterMeasure
    | AdapterUpdate
    | AdapterFetch
)


class LearningDesk:
    """Passes, the deep prompts of sessions, adapters, and what this peer trains, of one stream."""

    def __init__(
        self, service: Service, answers: AnswerQueue, understands_signs: Callable[[], bool]
    ) -> None:
        self.prompts = SessionPrompts(service, answers)
        self._passes = PassDesk(service, answers)
        self._adapters = AdapterDesk(service, answers, understands_signs)
        self._updates = UpdateDesk(service, answers)

    @property
    def active_at(self) -> float:
        """When something was last begun here, came further or was over; now, while it is done."""
        return max(desk.active_at for desk in (self._passes, self._adapters, self._updates))

    def take(self, message: LearningMessage, holder: Holder) -> None:
        """Begin with what is asked, or answer why not; or take the next piece of it.

        Raises RemoteProtocolError where it does not belong there.
        """
        if isinstance(message, AdapterHead | AdapterPiece | AdapterWithdrawal):
            self._adapters.take(message, holder)
        elif isinstance(message, Pass):
            self._passes.take(message, holder)
        elif isinstance(message, PassPiece):
            if not self.prompts.take(message):
                self._passes.take(message, holder)
        else:
            self._updates.take(message, holder)

    def end(self) -> None:
        """Drop what nobody waits for any more."""
        for desk in (self._adapters, self.prompts, self._passes, self._updates):
            desk.end()
