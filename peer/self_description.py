"""What a peer says of itself in its announcements: what it is, and how busy it is right now."""

from dataclasses import replace

from ..protocol.announcements import Announcement, PeerState
from .engine.compute_thread import ComputeThread
from .engine.engine import Engine
from .loop_lag import LoopLag
from .throughput import Throughput


class SelfDescription:
    """Makes announcements from a template; adds measurements once there are any."""

    def __init__(self, template: Announcement, lag: LoopLag) -> None:
        """Take everything but state, sequence, load and dates from `template`.

        An announcement lives as long as the template does.
        """
        self._template = template
        self._lifetime_seconds = template.expires_at - template.issued_at
        self._lag = lag
        self._serving: tuple[Engine, ComputeThread] | None = None

    def begin_serving(self, engine: Engine, compute: ComputeThread, measured: Throughput) -> None:
        """From now on tell the measured speed and the present load as well."""
        self._template = replace(
            self._template,
            decode_steps_per_second=measured.decode_steps_per_second,
            prefill_tokens_per_second=measured.prefill_tokens_per_second,
        )
        self._serving = engine, compute

    async def describe(self, state: PeerState, sequence: int, now: float) -> Announcement:
        """Return the announcement of this moment; `now` is wall seconds."""
        announcement = replace(
            self._template,
            state=state,
            sequence=sequence,
            issued_at=now,
            expires_at=now + self._lifetime_seconds,
            queue_seconds=self._lag.mean_seconds,
        )
        if self._serving is None:
            return announcement
        engine, compute = self._serving
        statistics = await compute.call(engine.pool.statistics)
        return replace(
            announcement,
            queue_seconds=compute.queue_seconds + self._lag.mean_seconds,
            free_kv_tokens=statistics.free_tokens,
        )
