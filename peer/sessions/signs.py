"""Signs of life to a client whose question waits, or is worked at."""

import asyncio

from ...protocol.ids import SessionId
from ...protocol.messages.session import Queued
from ...protocol.wire.codec import encode_frame
from ..engine.compute_thread import ComputeThread
from .answer_queue import AnswerQueue

SIGN_SECONDS = 1.0


class Signs:
    """Says every second that one question of a stream is not forgotten."""

    def __init__(self, compute: ComputeThread, answers: AnswerQueue) -> None:
        self._compute = compute
        self._answers = answers
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, question: SessionId) -> None:
        """Say so now, and again until `stop`."""
        self.stop()
        self._answers.put(encode_frame(Queued(question, 0, self._compute.pass_queue_seconds)))
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(SIGN_SECONDS, self.begin, question)

    def stop(self) -> None:
        """Say nothing more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
