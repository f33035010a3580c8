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
from typing import Any

from shoal.cli.main import main
from shoal.peer.sessions import sessions
from shoal.protocol.messages.session import Open, Step

_counts = {"prefill": 0, "answer": 0}


def die_at(point: str, nth: int) -> None:
    if sys.argv[1] == point:
        _counts[point] = _counts.get(point, 0) + 1
        if _counts[point] == nth:
            os.kill(os.getpid(), signal.Signals[sys.argv[2]])


class DyingStream(sessions.SessionStreamWork):
    async def _open(self, message: Open) -> None:
        die_at("open", 1)
        await super()._open(message)

    def _take_step(self, step: Step) -> None:
        if step.hidden.tokens > 1:
            die_at("prefill", 2)
        super()._take_step(step)

    def _settle(self, step: Step, held: Any, answer: Any, future: Any) -> None:
        super()._settle(step, held, answer, future)
        if step.hidden.tokens == 1:
            die_at("answer", 3)


if __name__ == "__main__":
    sessions.SessionStreamWork = DyingStream  # type: ignore[misc]
    sys.exit(main(sys.argv[3:]))
