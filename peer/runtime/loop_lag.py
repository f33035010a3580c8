"""How late the event loop is: the first thing that goes wrong when a peer is overloaded."""

import asyncio

from ...protocol.net.clock import Clock

_PERIOD_SECONDS = 0.25
_SMOOTHING = 0.1
"""Weight of the newest sample: the average looks back over some three seconds."""


class LoopLag:
    """Measures how much later than asked the loop wakes a sleeper. Run `run()` in a task."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.mean_seconds = 0.0
        self.max_seconds = 0.0

    def __repr__(self) -> str:
        return f"<LoopLag {1000 * self.mean_seconds:.1f} ms, at most {1000 * self.max_seconds:.0f}>"

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            due_at = self._clock.now() + _PERIOD_SECONDS
            await asyncio.sleep(_PERIOD_SECONDS)
            lag_seconds = max(0.0, self._clock.now() - due_at)
            self.mean_seconds += _SMOOTHING * (lag_seconds - self.mean_seconds)
            self.max_seconds = max(self.max_seconds, lag_seconds)
