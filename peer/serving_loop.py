"""The life of a peer that has joined: it serves a span, and maybe another one after it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..protocol.errors import DirectoryError, UnavailableError
from ..protocol.net.tasks import cancel_all
from ..protocol.records.announcements import MAX_DEVICE_CHARACTERS, PeerState
from ..protocol.spans import Span
from .announcing.announcer import Announcer, announce_offline
from .announcing.self_description import SelfDescription
from .engine.blocks.batch import HostedBlock
from .hosting.span_loader import LoadError, ServedSpan, SpanLoader
from .placement.placement import Placement
from .placement.placer import Placer
from .placement.swarm_news import tell_news
from .process.background import BackgroundTasks
from .process.config import PeerEvent, Report
from .process.pauses import ServingPauses
from .streams.service import Service, StreamHandler

_logger = logging.getLogger(__name__)

_MOVE_DRAIN_SECONDS = 30.0
"""How long sessions may go on at blocks that are wanted less than others. The swarm waits."""

_MEASURE_AGAIN_SECONDS = 300.0
"""How long a speed stands, at least: it may have been measured while the machine was busy. Eight
steps and a short prompt in this time are next to nothing."""

MakeService = Callable[[ServedSpan], Service]
"""Makes what serves streams from a span that is loaded."""


@dataclass(frozen=True)
class ServingLoop:
    """Serves one span after the other, with pauses.

    `find_address` says for people where the peer is found.
    """

    loader: SpanLoader
    make_service: MakeService
    handler: StreamHandler
    announcer: Announcer
    description: SelfDescription
    report: Report
    find_address: Callable[[], Mapping[str, object]]
    drain_seconds: float
    pauses: ServingPauses = field(default_factory=ServingPauses)

    async def run(
        self, span: Span | None, placer: Placer, tasks: BackgroundTasks, stop: asyncio.Event
    ) -> None:
        """Serve a span until told to stop; without one, serve where the swarm needs it."""
        is_placed = span is None
        if span is None:
            decision = await placer.choose_first()
            span = decision.span
            self._tell("placed", decision)
        self.description.planned = span
        await self.announcer.announce(PeerState.JOINING)
        tasks.begin(self.announcer.run())
        tasks.begin(tell_news(placer.read_known, placer.list_revoked, self.announcer, self.report))
        kept: dict[int, HostedBlock] = {}
        origin: Span | None = None
        while span is not None:
            try:
                if origin is not None:
                    self.loader.check_room(span, kept)
                decision, kept = await self._serve(
                    span, kept, placer if is_placed else None, tasks, stop
                )
            except LoadError as error:
                if origin is None:
                    raise
                placer.avoid(error.blocks)
                await self._turn_back(origin, error)
                span, origin = origin, None  # what cannot be loaded there either ends the peer
            else:
                span, origin = None if decision is None else decision.span, span

    async def _serve(
        self,
        span: Span,
        kept: dict[int, HostedBlock],
        placer: Placer | None,
        tasks: BackgroundTasks,
        stop: asyncio.Event,
    ) -> tuple[Placement | None, dict[int, HostedBlock]]:
        """Serve a span; return where to go on, with which blocks, or None to leave.

        Memory is for the next span: when this returns, nothing may hold on to what was served.
        """
        async with self.loader.serve(span, kept, self._tell_loading) as served:
            kept.clear()  # what was kept for the way back has to go, too
            decision = None
            while decision is None and await self._rest(served, tasks, stop):
                decision = await self._serve_loaded(served, placer, tasks, stop)
            if decision is None or decision.span is None:
                return None, {}
            return decision, self.loader.keep_blocks(served.engine, decision.span)

    async def _rest(self, served: ServedSpan, tasks: BackgroundTasks, stop: asyncio.Event) -> bool:
        """Wait while there is a reason to pause; return whether to go on, and not to leave.

        Reports `paused`.
        """
        while self.pauses.wanted.is_set() and not stop.is_set():
            await announce_offline(self.announcer)
            self.pauses.resting.set()
            self.report(PeerEvent("paused", {"why": list(self.pauses.reasons)}))
            await tasks.run_until(_watch(served, stop, self.pauses.unwanted))
            self.pauses.resting.clear()
        return not stop.is_set()

    async def _serve_loaded(
        self,
        served: ServedSpan,
        placer: Placer | None,
        tasks: BackgroundTasks,
        stop: asyncio.Event,
    ) -> Placement | None:
        """Serve a span that is loaded; return where to go on, or None to leave or to pause."""
        service = self.make_service(served)
        try:
            await self._begin(served, service)
            self.pauses.serving.set()
            others: list[Coroutine[Any, Any, Placement | None]] = [
                self._renew_speed(served, service)
            ]
            if placer is not None:
                others.append(placer.wait_for_move(served))
            decision = await tasks.run_until(_watch(served, stop, self.pauses.wanted, *others))
            return await self._end(service, decision, stop)
        finally:
            await service.hang_up()

    async def _begin(self, served: ServedSpan, service: Service) -> None:
        """Let streams and sessions come."""
        describe_load = [workload.describe for workload in service.workloads]
        engine, throughput = served.engine, served.throughput
        self.description.begin_serving(
            engine.span,
            engine.kernels,
            engine.device.name[:MAX_DEVICE_CHARACTERS],
            throughput.decode_steps_per_second,
            throughput.prefill_tokens_per_second,
            describe_load,
        )
        self.handler.service = service
        # A peer that was announced is announced again as soon as the directory can be written.
        await self._announce_if_possible(PeerState.ONLINE)
        self.report(PeerEvent("online", {**self._describe(served), **self.find_address()}))

    async def _renew_speed(self, served: ServedSpan, service: Service) -> None:
        """Measure again and again where the peer is idle, and tell a speed that has changed.

        The next announcement carries it. Reports `speed`.
        """
        while True:
            await asyncio.sleep(_MEASURE_AGAIN_SECONDS)
            fresh = await self.loader.measure_again(served, lambda: service.is_empty)
            if fresh is not None and fresh.differs_notably(served.throughput):
                served.throughput = fresh
                self.description.change_speed(
                    fresh.decode_steps_per_second, fresh.prefill_tokens_per_second
                )
                self.report(PeerEvent("speed", self._describe(served)))

    async def _end(
        self, service: Service, decision: Placement | None, stop: asyncio.Event
    ) -> Placement | None:
        """Take no new sessions and passes, give those there are their time; return where to go on.

        None is to leave, also if that was asked for in the meantime, or to pause. Streams still
        come: those of sessions that are here, and others hear it.
        """
        self.pauses.serving.clear()
        service.begin_draining()
        if decision is not None:
            self._tell("moving", decision)
            await _race(service.wait_until_empty(_MOVE_DRAIN_SECONDS), stop.wait())
            decision = None if stop.is_set() else decision
        if decision is not None:
            self.report(PeerEvent("drained"))
        else:
            self.description.planned = None  # an intent may be out
            await self._drain(service)
        self.description.end_serving()
        if decision is None:
            await announce_offline(self.announcer)
        self.handler.service = None
        return decision

    async def _turn_back(self, origin: Span, error: LoadError) -> None:
        """Say that the span from before will be served again."""
        self.report(PeerEvent("returning", {"target": str(origin), "why": str(error)}))
        self.description.planned = origin
        await self._announce_if_possible(PeerState.JOINING)

    async def _drain(self, service: Service) -> None:
        if service.is_empty or self.drain_seconds <= 0:
            return
        self.report(PeerEvent("draining", dict(service.count_work())))
        await self._announce_if_possible(PeerState.DRAINING)
        await service.wait_until_empty(self.drain_seconds)

    async def _announce_if_possible(self, state: PeerState) -> None:
        try:
            await self.announcer.announce(state)
        except DirectoryError as error:
            _logger.warning("could not announce the state %s: %s", state, error)

    def _describe(self, served: ServedSpan) -> dict[str, object]:
        engine, throughput = served.engine, served.throughput
        return {
            "peer_id": self.announcer.peer_id,
            "model_id": self.description.model_id,
            "span": str(engine.span),
            "num_blocks": engine.spec.num_blocks,
            "weights_bytes": engine.num_weight_bytes,
            "kernels": engine.kernels,
            "decode_steps_per_second": round(throughput.decode_steps_per_second, 1),
            "prefill_tokens_per_second": round(throughput.prefill_tokens_per_second, 1),
        }

    def _tell(self, name: str, decision: Placement) -> None:
        self.report(PeerEvent(name, {"target": str(decision.span), "why": decision.why}))

    def _tell_loading(self, num_done: int, num_blocks: int) -> None:
        self.report(PeerEvent("loading", {"done": num_done, "blocks": num_blocks}))


async def _watch(
    served: ServedSpan,
    stop: asyncio.Event,
    turn: asyncio.Event,
    *others: Coroutine[Any, Any, Placement | None],
) -> Placement | None:
    """Wait until one of the others returns where to go on, or, that is None, an event is set.

    Raises UnavailableError when the compute thread dies: all steps would be refused.
    """
    dying = asyncio.wait([served.compute.died])
    stopping, turning, dead, *ended = await _race(stop.wait(), turn.wait(), dying, *others)
    if not (stopping.cancelled() and turning.cancelled()):
        return None
    if not dead.cancelled():
        raise UnavailableError("the compute thread has failed; start the peer again")
    return next(task for task in ended if not task.cancelled()).result()


async def _race(*waits: Coroutine[Any, Any, Any]) -> list[asyncio.Task[Any]]:
    """Wait for the first of some; return all as tasks, of which the others are cancelled."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks
    finally:
        await cancel_all(tasks)
