"""What a peer says of itself in its announcements: what it is, and how busy it is right now."""

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from ...kernels.linear.quantize import WeightFormat
from ...protocol.endpoints import Endpoint, Relay
from ...protocol.errors import LocalProtocolError, RefusedError
from ...protocol.ids import ModelId, PeerId
from ...protocol.records.announcements import Announcement, ComputeDtype, PeerState
from ...protocol.spans import Span
from ...protocol.versions import MAX_VERSION, MIN_VERSION, SOFTWARE
from ..engine.cache.kv_pool import KVCachePool, KVCacheStatistics
from ..engine.devices.device import COMPUTE_DTYPES
from ..hosting.hosting import Stay
from ..pushing.reverse_connections import ReverseConnections
from ..runtime.config import PeerConfig
from ..runtime.loop_lag import LoopLag
from .announcer import LIFETIME_PERIODS
from .delays import Delays

_logger = logging.getLogger(__name__)

_DTYPE_NAMES: dict[torch.dtype, ComputeDtype] = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}


def make_template(
    config: PeerConfig,
    peer_id: PeerId,
    model_id: ModelId,
    num_blocks: int,
    endpoint: Endpoint,
) -> Announcement:
    """Return the announcement without what changes; of its dates only the lifetime counts.

    The span is all blocks, until one is planned or served.
    Of kernels it says nothing: which are fastest is measured with the threads that the engine gets.
    """
    weights = WeightFormat(config.weights)
    return Announcement(
        peer_id=peer_id,
        model_id=model_id,
        num_blocks=num_blocks,
        span=Span(0, num_blocks),
        state=PeerState.JOINING,
        endpoints=(endpoint,),
        min_version=MIN_VERSION,
        max_version=MAX_VERSION,
        software=SOFTWARE,
        weights=weights.value,
        compute_dtype=_DTYPE_NAMES[COMPUTE_DTYPES[weights]],
        sequence=0,
        issued_at=0.0,
        expires_at=LIFETIME_PERIODS * config.announce_period_seconds,
        takes_passes=config.pass_bytes != 0,
    )


def _take_stock(pool: KVCachePool) -> KVCacheStatistics:
    """Return the account of the KV memory, and say loudly if it does not add up."""
    try:
        pool.check_integrity()
    except LocalProtocolError:
        _logger.exception("the account of the KV memory is wrong: a bug of shoal")
    return pool.statistics()


class SelfDescription:
    """Makes announcements from a template; adds measurements once there are any."""

    def __init__(
        self,
        template: Announcement,
        lag: LoopLag,
        work: Sequence[float],
        delays: Delays | None = None,
        reverse: ReverseConnections | None = None,
    ) -> None:
        """Take everything but state, sequence, load and dates from `template`.

        An announcement lives as long as the template does. `work` is what a step costs in each
        block of the model. Without `delays` nothing is said of how far others are, without
        `reverse` nothing is parked anywhere.
        """
        self._template = template
        self._delays = delays
        self._reverse = reverse
        self._lifetime_seconds = template.expires_at - template.issued_at
        self._lag = lag
        self._work = work
        self._serving: Stay | None = None
        self.planned: Span | None = None
        """Where the peer intends to be; None: where it is."""

    def plan(self, span: Span | None) -> None:
        """From now on tell this span, and what is known of the speed, until it is served."""
        self.planned = span

    def begin_serving(self, stay: Stay) -> None:
        """From now on tell what is served, how fast, and the present load."""
        engine, measured = stay.engine, stay.throughput
        self.planned = None
        self._template = replace(
            self._template,
            span=engine.span,
            kernels=engine.kernels,
            decode_steps_per_second=_round(measured.decode_steps_per_second),
            prefill_tokens_per_second=_round(measured.prefill_tokens_per_second),
        )
        self._serving = stay

    def move_behind(self, relays: Sequence[Relay]) -> None:
        """From now on tell that these carry streams to us, and that nobody can dial us."""
        self._template = replace(self._template, endpoints=(), relays=tuple(relays))

    def end_serving(self) -> None:
        """From now on tell of no load: there is nothing that has one."""
        self._serving = None

    async def describe(self, state: PeerState, sequence: int, now: float) -> Announcement:
        """Return the announcement of this moment; `now` is wall seconds."""
        now = round(now, 3)
        announcement = replace(
            self._template if self.planned is None else self._move(self.planned),
            state=state,
            sequence=sequence,
            issued_at=now,
            expires_at=now + self._lifetime_seconds,
            queue_seconds=_round(self._lag.mean_seconds),
        )
        if self._delays is not None:
            announcement = self._delays.describe(announcement)
        if self._reverse is not None:
            announcement = self._reverse.describe(announcement)
        if self._serving is None or state is PeerState.OFFLINE:
            return announcement  # who leaves has no load to tell, and maybe no compute thread
        engine, compute = self._serving.engine, self._serving.compute
        try:
            statistics = await compute.call(lambda: _take_stock(engine.pool))
        except RefusedError:  # the thread ends: the peer moves
            return announcement
        return replace(
            announcement,
            queue_seconds=_round(compute.queue_seconds + self._lag.mean_seconds),
            pass_queue_seconds=_round(compute.pass_queue_seconds),
            free_kv_tokens=statistics.free_tokens,
        )

    def _move(self, span: Span) -> Announcement:
        """Return what the peer would say at another span, given the speed at this one."""
        template = self._template
        ratio = self._sum_work(template.span) / self._sum_work(span)
        decode, prefill = template.decode_steps_per_second, template.prefill_tokens_per_second
        return replace(
            template,
            span=span,
            decode_steps_per_second=None if decode is None else ratio * decode,
            prefill_tokens_per_second=None if prefill is None else ratio * prefill,
        )

    def _sum_work(self, span: Span) -> float:
        return sum(self._work[span.start : span.stop])


def _round(number: float) -> float:
    """Return a measured number as it is announced: the other digits are noise, and bytes."""
    return float(f"{number:.4g}")
