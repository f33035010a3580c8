"""A peer that trains: the parts that it is made of, and how they meet in its swarm."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
)
from functools import partial
from typing import Any, cast

from ...protocol.errors import UsageError
from ...protocol.identity import Identity
from ...protocol.ids import MemberId
from ...protocol.net.clock import Clock
from ...protocol.net.network import Network, Presence
from ...protocol.records.announcements import PeerState
from ..announcing.announcer import Announcer, announce_offline
from ..announcing.run_description import RunDescription
from ..engine.training.numerics_class import compute_class_digest
from ..process.config import PeerEvent, Report, ignore
from ..streams.service import Service, StreamHandler
from .remote_members import RemoteMembers
from .run_resources import Compute, RunPeerConfig, RunResources, WatchedCompute, make_compute
from .run_workload import RunWorkload, make_run_service
from .training_loop import TrainingLoop

_EXPORT_SECONDS = 600.0
"""How long a peer stays after the last update for clients that export the model: any may."""


class RunPeer:
    """A peer that has joined its swarm, and trains as long as `serve` runs."""

    def __init__(
        self,
        loop: TrainingLoop,
        announcer: Announcer,
        resources: RunResources,
        workload: RunWorkload,
        clock: Clock,
    ) -> None:
        self.loop = loop
        self.announcer = announcer
        self.resources = resources
        self._workload = workload
        self._clock = clock

    @classmethod
    @asynccontextmanager
    async def join(
        cls,
        config: RunPeerConfig,
        network: Network,
        clock: Clock,
        report: Report = ignore,
        *,
        identity: Identity | None = None,
        compute: Compute | None = None,
        incarnation: str | None = None,
        compute_class: str | None = None,
    ) -> AsyncGenerator[RunPeer]:
        """Read the run, listen and join the directory; leave in good order at the end.

        `compute` runs what is computed; None: on a thread of its own. `incarnation` tells this
        process from all others of the same identity; None: a random one. `compute_class` is the
        digest of what this machine computes; None: it is measured.
        """
        async with AsyncExitStack() as stack:
            opening = open_run(config, clock, compute=compute, compute_class=compute_class)
            resources, compute_class = await stack.enter_async_context(opening)
            joining = StreamHandler.join(network, identity or Identity.generate(), clock, report)
            handler, presence = await stack.enter_async_context(joining)
            incarnation = incarnation or secrets.token_hex(8)
            member_id = MemberId(f"{presence.identity.peer_id}/{incarnation}")
            loop = partial(TrainingLoop, member_id, resources, compute_class)
            peer, service = cls._compose(stack, member_id, resources, loop, presence, clock, report)
            for listener in presence.listeners:
                stack.push_async_callback(listener.close)
            handler.service = service
            await peer.announcer.announce(PeerState.ONLINE)
            yield peer

    @classmethod
    @asynccontextmanager
    async def join_beside(
        cls,
        opened: tuple[RunResources, str],
        handler: StreamHandler,
        presence: Presence,
        clock: Clock,
        report: Report = ignore,
    ) -> AsyncGenerator[RunPeer]:
        """Take part in a run as a peer that has joined its swarm, and does other things as well.

        `opened` is what `open_run` yields.
        """
        resources, compute_class = opened
        record = resources.config.record
        async with AsyncExitStack() as stack:
            member_id = MemberId(f"{presence.identity.peer_id}/{secrets.token_hex(8)}")
            loop = partial(TrainingLoop, member_id, resources, compute_class)
            peer, service = cls._compose(stack, member_id, resources, loop, presence, clock, report)
            handler.others[record.model_id] = service
            stack.callback(handler.others.pop, record.model_id)
            await peer.announcer.announce(PeerState.ONLINE)
            yield peer

    @classmethod
    def _compose(
        cls,
        stack: AsyncExitStack,
        member_id: MemberId,
        resources: RunResources,
        make_loop: Callable[[RemoteMembers, Clock, Report], TrainingLoop],
        presence: Presence,
        clock: Clock,
        report: Report,
    ) -> tuple[RunPeer, Service]:
        """Make the parts of a member of the run, and its service; the stack ends all of it."""
        config = resources.config
        record, period_seconds = config.record, config.announce_period_seconds
        members = RemoteMembers(member_id, record, presence, clock, config.silence_seconds)
        stack.push_async_callback(members.close)
        told = RunDescription(record, len(resources.whole), presence, period_seconds)
        announcer = Announcer(
            presence.directory, presence.identity, told.describe, clock, period_seconds
        )
        tell = partial(_note_progress, told, resources, announcer, report)
        loop = make_loop(members, clock, tell)
        members.answer_here = loop.answer
        stack.push_async_callback(loop.close)
        stack.push_async_callback(announce_offline, announcer)
        changed = asyncio.Event()
        workload = RunWorkload(
            record, member_id, loop.answer, loop.find_input_bytes, changed.set,
            lambda: resources.compute.is_late,
        )  # fmt: skip
        service = make_run_service(workload, resources.whole, clock, changed)
        stack.push_async_callback(service.hang_up)
        return cls(loop, announcer, resources, workload, clock), service

    async def leave(self) -> None:
        """Leave the run behind the update that is under way, and finish what members fetch."""
        await self.loop.leave()
        await self._wait_until_unasked(0.0, 0.0)

    async def linger(self) -> None:
        """Stay until no member has asked for parts, sums or state for a while."""
        self.loop.asked_at = self._clock.now()
        await self._wait_until_unasked(self.resources.config.linger_seconds, _EXPORT_SECONDS)

    async def finish_or_leave(
        self, finish: Callable[[], Coroutine[Any, Any, None]], stop: asyncio.Event, may_leave: bool
    ) -> None:
        """Finish; or, at `stop`, leave in good order where there is time for that."""

        async def leave() -> None:
            await stop.wait()
            if may_leave:
                await self.leave()

        ends = [asyncio.create_task(finish()), asyncio.create_task(leave())]
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
            await asyncio.wait(ends)
        for end in done:
            end.result()

    async def _wait_until_unasked(self, seconds: float, export_seconds: float) -> None:
        """Wait until members ask nothing for so long; finish exports for `export_seconds` only."""
        deadline = self._clock.now() + export_seconds
        while True:
            now = self._clock.now()
            left = self.loop.asked_at + seconds - now
            if left <= 0 and not self._is_asked(now < deadline):
                return
            await asyncio.sleep(max(left, self.resources.config.pause_seconds))

    def _is_asked(self, by_anybody: bool) -> bool:
        """Return whether something is under way, for a member or anybody."""
        decisions = self.loop.decisions
        roster = () if decisions is None else decisions.newest.roster
        return any(by_anybody or one in roster for one in self._workload.asking)

    async def serve(self, until: Awaitable[object]) -> None:
        """Train until something happens. Raises UsageError where the run does not take us."""
        try:
            async with asyncio.TaskGroup() as tasks:
                announcing = tasks.create_task(self.announcer.run())
                await self.loop.run(until)
                announcing.cancel()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None


@asynccontextmanager
async def training_beside(
    joining: AbstractAsyncContextManager[RunPeer],
    stop: asyncio.Event,
    may_leave: bool,
    report: Report,
) -> AsyncGenerator[None]:
    """Train until the run is over, or `stop` is set, in a process that does other things inside.

    Reports `training`, and `trained` or why it has ended otherwise: `training_stopped`.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_train_beside(joining, stop, may_leave, report))
            yield
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


async def _train_beside(
    joining: AbstractAsyncContextManager[RunPeer],
    stop: asyncio.Event,
    may_leave: bool,
    report: Report,
) -> None:
    try:
        async with joining as peer:
            record, loop = peer.resources.config.record, peer.loop
            facts = {"name": record.run.name, "owner": record.owner, "run_id": record.run_id}
            report(PeerEvent("training", facts))

            async def finish() -> None:
                await loop.wait_until_over()
                if loop.failure is None:
                    report(PeerEvent("trained", {}))
                await peer.linger()

            await peer.serve(peer.finish_or_leave(finish, stop, may_leave))
            why = loop.failure
    except UsageError as error:
        why = str(error)
    if why is not None:
        report(PeerEvent("training_stopped", {"why": why}))


@asynccontextmanager
async def open_run(
    config: RunPeerConfig,
    clock: Clock,
    *,
    compute: Compute | None = None,
    compute_class: str | None = None,
    is_beside: bool = False,
) -> AsyncGenerator[tuple[RunResources, str]]:
    """Read what the run needs, and measure what computes it where that is not given.

    `is_beside`: the process serves as well. Raises UsageError, for a shard that is missing as well.
    """
    with ExitStack() as stack:
        compute = compute or make_compute(stack, is_beside=is_beside)
        watched = WatchedCompute(compute, clock, config.silence_seconds)
        resources = await asyncio.to_thread(RunResources.open, config, watched)
        if compute_class is None:
            measure = partial(compute_class_digest, config.run, config.num_threads)
            compute_class = cast(str, await compute(measure))
        yield resources, compute_class


def _note_progress(
    told: RunDescription,
    resources: RunResources,
    announcer: Announcer,
    report: Report,
    event: PeerEvent,
) -> None:
    """Have the next announcement tell an update, and announce another stage at once."""
    if event.name == "update":
        facts = cast(dict[str, Any], event.facts)
        if told.note(resources.spans[facts["stage"]], facts["update"], facts["loss"]):
            announcer.renew_now()
    report(event)
