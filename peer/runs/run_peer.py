"""A peer that trains: the parts that it is made of, composed onto a peer that has joined."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from functools import partial
from typing import Any, cast

from ...protocol.errors import DirectoryError, RevokedError, UsageError
from ...protocol.ids import MemberId
from ...protocol.net.clock import Clock
from ...protocol.records.announcements import PeerState
from ..announcing.announcer import Announcer, announce_offline
from ..announcing.run_description import RunDescription
from ..engine.training.numerics_class import compute_class_digest
from ..process.config import PeerEvent, Report, ignore
from ..streams.service import JoinedPeer
from .remote_members import RemoteMembers
from .run_resources import Compute, RunPeerConfig, RunResources, WatchedCompute, make_compute
from .run_workload import RunWorkload, make_run_service
from .training_loop import TrainingLoop

_EXPORT_SECONDS = 600.0
"""How long a peer stays after the last update for clients that export the model: any may."""


class RunPeer:
    """A peer that takes part in a run, and trains as long as `serve` runs."""

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
        joined: JoinedPeer,
        resources: RunResources,
        clock: Clock,
        report: Report = ignore,
        *,
        incarnation: str | None = None,
    ) -> AsyncGenerator[RunPeer]:
        """Take part in a run, beside whatever else the peer does; leave in good order at the end.

        `incarnation` tells this process from all others of the same identity; None: a random one.
        """
        presence, config = joined.presence, resources.config
        record, period_seconds = config.record, config.announce_period_seconds
        incarnation = incarnation or secrets.token_hex(8)
        member_id = MemberId(f"{presence.identity.peer_id}/{incarnation}")
        async with AsyncExitStack() as stack:
            counts = joined.handler.counts
            members = RemoteMembers(
                member_id, record, presence, clock, config.silence_seconds, counts
            )
            stack.push_async_callback(members.close)
            told = RunDescription(record, len(resources.whole), presence, period_seconds)
            announcer = Announcer(
                presence.directory, presence.identity, told.describe, clock, period_seconds
            )
            tell = partial(_note_progress, told, resources, announcer, report)
            loop = TrainingLoop(member_id, resources, members, clock, tell)
            members.answer_here = loop.answer
            stack.push_async_callback(loop.close)
            stack.push_async_callback(announce_offline, announcer)
            changed = asyncio.Event()
            workload = RunWorkload(
                record, member_id, loop.answer, loop.find_input_bytes, changed.set,
                lambda: resources.compute.is_late,
            )  # fmt: skip
            service = make_run_service(workload, resources.whole, clock, changed, counts)
            stack.push_async_callback(service.hang_up)
            joined.handler.others[record.model_id] = service
            stack.callback(joined.handler.others.pop, record.model_id)
            try:
                await announcer.announce(PeerState.ONLINE)
            except RevokedError:
                raise
            except DirectoryError:  # what the process serves goes on
                announcer.renew_now()
            yield cls(loop, announcer, resources, workload, clock)

    def describe(self) -> dict[str, object]:
        """Return which run it is, for people."""
        record = self.resources.config.record
        return {
            "name": record.run.name,
            "owner": record.owner,
            "run_id": record.run_id,
            "num_updates": record.run.num_updates,
            "parts_per_update": record.run.parts_per_update,
            "tokens_per_update": record.run.tokens_per_update,
        }

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
                doing = self.announcer.run(), self.loop.follow(), self.loop.lead()
                started = [tasks.create_task(each) for each in doing]
                await until
                for each in started:
                    each.cancel()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None


@asynccontextmanager
async def open_run(
    config: RunPeerConfig,
    clock: Clock,
    *,
    compute: Compute | None = None,
    compute_class: str | None = None,
    is_beside: bool = False,
) -> AsyncGenerator[RunResources]:
    """Read what the run needs, and measure what this machine computes where that is not given.

    `compute` runs what is computed; None: a thread of its own. `is_beside`: the process serves as
    well. Raises UsageError, for a shard that is missing as well.
    """
    stack = ExitStack()
    try:
        compute = WatchedCompute(
            compute or make_compute(stack, config.num_threads, is_beside=is_beside),
            clock,
            config.silence_seconds,
        )
        if compute_class is None:
            measure = partial(compute_class_digest, config.run, config.num_threads)
            compute_class = cast(str, await compute(measure))
        yield await asyncio.to_thread(RunResources.open, config, compute, compute_class)
    finally:
        await asyncio.to_thread(stack.close)  # it waits for what is computed


@asynccontextmanager
async def training_beside(
    joined: JoinedPeer,
    find_config: Callable[[Report], Awaitable[RunPeerConfig]],
    clock: Clock,
    stop: asyncio.Event,
    report: Report,
    *,
    may_leave: bool,
) -> AsyncGenerator[None]:
    """Train until the run is over, or `stop` is set, in a peer that does other things inside.

    `find_config` may take as long as those last. `may_leave`: in good order, which takes the time
    of an update. Reports `training`, and `trained` or why it has ended otherwise:
    `training_stopped`.
    """
    has_joined = asyncio.Event()

    async def train() -> None:
        try:
            async with AsyncExitStack() as stack:
                opening = open_run(await find_config(report), clock, is_beside=True)
                resources = await stack.enter_async_context(opening)
                joining = RunPeer.join(joined, resources, clock, report)
                peer = await stack.enter_async_context(joining)
                has_joined.set()
                report(PeerEvent("training", peer.describe()))
                await peer.serve(peer.finish_or_leave(partial(finish, peer), stop, may_leave))
                why = peer.loop.failure
        except UsageError as error:
            why = str(error)
        if why is not None:
            report(PeerEvent("training_stopped", {"why": why}))

    async def finish(peer: RunPeer) -> None:
        await peer.loop.is_over.wait()
        if peer.loop.failure is None:
            report(PeerEvent("trained", {}))
        await peer.linger()

    try:
        async with asyncio.TaskGroup() as tasks:
            training = tasks.create_task(train())
            yield
            if not has_joined.is_set():
                training.cancel()
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


def _note_progress(
    told: RunDescription,
    resources: RunResources,
    announcer: Announcer,
    report: Report,
    event: PeerEvent,
) -> None:
    """Have the next announcement tell an update and the held-out loss; announce another stage, and
    the held-out loss of the end, at once.
    """
    facts = cast(dict[str, Any], event.facts)
    if event.name == "update":
        if told.note(resources.spans[facts["stage"]], facts["update"], facts["loss"]):
            announcer.renew_now()
    elif event.name == "held_out":
        told.note_held_out(facts["loss"])
        if facts["update"] == resources.run.num_updates:
            announcer.renew_now()
    report(event)
