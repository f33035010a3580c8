"""A `shoal` whose peer sends itself a signal at a chosen point of the protocol.

    python dying_peer.py POINT SIGNAL serve MODEL ...

POINT is `open` (asked to open a session, not answered yet), `prefill` (the second piece of a
prompt or of a replay has arrived, not computed yet) or `answer` (the third single token is
computed, its answer not sent yet). SIGNAL is SIGKILL or SIGSTOP. Everything up to there is the
real program.
"""

import os
import signal
import sys
from collections.abc import Awaitable, Mapping

from shoal.cli.main import main
from shoal.peer.sessions import sessions
from shoal.peer.streams.client_stream import ClientStream, Handler
from shoal.protocol.messages.fields import Message
from shoal.protocol.messages.session import Open, Step

_counts = {"prefill": 0, "answer": 0}


def die_at(point: str, nth: int) -> None:
    if sys.argv[1] == point:
        _counts[point] = _counts.get(point, 0) + 1
        if _counts[point] == nth:
            os.kill(os.getpid(), signal.Signals[sys.argv[2]])


class DyingStream(sessions.SessionStreamWork):
    def __init__(self, workload: sessions.SessionWorkload, stream: ClientStream) -> None:
        super().__init__(workload, stream)
        self._held_sessions = workload.admission.sessions
        self._original_handlers = super().handlers

    @property
    def handlers(self) -> Mapping[type[Message], Handler]:
        return {**self._original_handlers, Open: self._die_at_open, Step: self._die_at_step}

    def _die_at_open(self, message: Open) -> Awaitable[None] | bool | None:
        die_at("open", 1)
        return self._original_handlers[Open](message)

    def _die_at_step(self, step: Step) -> None:
        if step.hidden.tokens > 1:
            die_at("prefill", 2)
        held = self._held_sessions.get(step.session)
        before = set(held.cache.running) if held is not None else set()
        self._original_handlers[Step](step)
        if held is not None and step.hidden.tokens == 1:
            for future in held.cache.running - before:  # none for a step that is not computed
                future.add_done_callback(lambda _: die_at("answer", 3))


if __name__ == "__main__":
    sessions.SessionStreamWork = DyingStream  # type: ignore[misc]
    sys.exit(main(sys.argv[3:]))
