"""Passes as a workload: tensors come in on a stream, are computed, and what came of them goes out.

The memory that passes share with uploads and updates of adapters is accounted for here as well.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ...protocol.errors import ErrorCode, RefusedError, RemoteProtocolError
from ...protocol.fair_share import BUSY_SECONDS, SharedBytes, Tenant
from ...protocol.ids import ModelId, SessionId
from ...protocol.messages.fields import Message
from ...protocol.messages.passes import (
    Pass,
    Passed,
    PassKind,
    PassPiece,
    PiecesReader,
    list_answer_slots,
    list_question_slots,
)
from ...protocol.net.clock import Clock
from ...protocol.records.announcements import Announcement
from ..engine.adapters.adapter_store import AdapterStore, KeptAdapter
from ..engine.compute_thread import ComputeThread
from ..engine.engine import Engine
from ..engine.pass_queue import ComputedPass, PassJob
from ..engine.passes.pass_memory import PassBudget
from ..streams.client_stream import ClientStream, Handler, KeepAlive, StreamWork
from ..streams.service import Limits, Workload
from .wire_passes import (
    Adapters,
    WireWork,
    check_adapters,
    count_cost,
    cut_adapters,
    find_accumulated,
    find_kept,
    run_pass,
)

_logger = logging.getLogger(__name__)

_READING_SECONDS = 10.0
"""How long a peer that leaves its span waits for adapters that are being read."""

_UPLOAD_SECONDS = 300.0
"""How long the tensors of a pass may be on their way, while the memory for all of them is kept: 85
MiB, the most in 16 bits, need 286 seconds at 2.5 megabits a second."""

_FLOAT_BYTES = 4


@dataclass(eq=False)
class PassResources:
    """Resources that the passes of a peer share with its other workloads."""

    model_id: ModelId
    pass_bytes: int
    """Memory for passes; 0: none are taken."""
    adapter_store: AdapterStore
    read_free_bytes: Callable[[], int]
    """Returns the memory that is left where the blocks are computed."""
    note_change: Callable[[], None]
    """To be called when a pass or an update is over."""

    @property
    def budget(self) -> PassBudget:
        """What passes may take of it, by purpose."""
        return PassBudget(self.pass_bytes)


class PassWorkload(Workload):
    """All passes of a peer, and the account for them and for adapters that are updated."""

    def __init__(
        self, engine: Engine, compute: ComputeThread, clock: Clock, resources: PassResources
    ) -> None:
        self.engine = engine
        self.compute = compute
        self.clock = clock
        self.resources = resources
        self.tensors = SharedBytes(resources.budget.tensor_bytes, 3, "tensors and adapters")
        """Memory for tensors of passes on their way, and for adapters that are fetched."""
        self.num_running = 0
        """Passes and updates that come in, wait, are computed or answered."""
        self.is_draining = False
        self.readings: set[asyncio.Future[Any]] = set()
        """Adapters that are being read, maybe of streams that are over by now."""
        engine.passes.activations.limit(resources.budget.kept_bytes)
        compute.limit_passes(resources.budget.work_bytes)

    def apply_limits(self, limits: Limits) -> None:
        """See Workload.apply_limits."""
        self.resources.pass_bytes = limits.pass_bytes
        budget = self.resources.budget
        self.tensors.budget_bytes = budget.tensor_bytes
        self.compute.post(partial(self.engine.passes.activations.limit, budget.kept_bytes))
        self.compute.limit_passes(budget.work_bytes)
        self.resources.adapter_store.limit(limits.adapter_bytes)

    @property
    def is_idle(self) -> bool:
        """Whether no pass and no update is there."""
        return not self.num_running

    def accept(self, stream: ClientStream) -> PassStreamWork:
        """See Workload.accept."""
        return PassStreamWork(self, stream)

    def begin_draining(self) -> None:
        """Take no more passes and adapters; those that are here come to their end."""
        self.is_draining = True

    def count(self) -> Mapping[str, int]:
        """See Workload.count."""
        return {"passes": self.num_running}

    def describe(self, announcement: Announcement) -> Announcement:
        """Add whether passes are taken, and how long they wait."""
        return replace(
            announcement,
            takes_passes=self.resources.pass_bytes > 0,
            pass_queue_seconds=self.estimate_wait_seconds(),
        )

    def measure(self) -> Mapping[str, float]:
        """See Workload.measure."""
        store = self.resources.adapter_store
        return {
            "passes": self.num_running,
            "pass_queue_seconds": self.estimate_wait_seconds(),
            "training_used_bytes": self.tensors.used_bytes,
            "training_budget_bytes": self.resources.pass_bytes,
            "adapters": len(store),
            "adapter_used_bytes": store.shared.used_bytes,
            "adapter_budget_bytes": store.shared.budget_bytes,
        }

    async def close(self) -> None:
        """Keep no adapters any more; those that are being read just now are dropped."""
        if self.readings:
            await asyncio.wait(self.readings, timeout=_READING_SECONDS)
        self.resources.adapter_store.close()

    def estimate_wait_seconds(self) -> float:
        """Return how long a pass of one more client would wait."""
        return self.compute.pass_queue_seconds

    def begin(self) -> None:
        """Note that a pass or an update has begun."""
        self.num_running += 1

    def end(self) -> None:
        """Note that one is over."""
        self.num_running -= 1
        self.resources.note_change()


@dataclass
class _OpenPass:
    """The pass of a stream, from the first word until its answer is sent."""

    work: WireWork
    tenant: Tenant
    reader: PiecesReader
    num_bytes: int
    work_bytes: int
    kept: Collection[KeptAdapter]
    job: PassJob | None = None


class AccountedStreamWork(StreamWork):
    """The base of all work on one stream that shares the account of passes."""

    def __init__(self, passes: PassWorkload, stream: ClientStream) -> None:
        self._passes = passes
        self._clock = passes.clock
        self._stream = stream
        self._answers = stream.answers
        self._keep_alive = KeepAlive(stream.answers, passes.estimate_wait_seconds)
        self._timer: asyncio.TimerHandle | None = None  # of what is on its way

    @property
    def _store(self) -> AdapterStore:
        return self._passes.resources.adapter_store

    def _refuse(self, request: SessionId, error: BaseException) -> None:
        """Say why a request is refused; what else went wrong is our fault, and logged."""
        if not isinstance(error, RefusedError):
            _logger.error("a request failed and is refused", exc_info=error)
            error = RefusedError(ErrorCode.INTERNAL, "the peer failed to do what was asked")
        self._answers.refuse(request, error)

    def _stop_timers(self) -> None:
        self._keep_alive.stop()
        if self._timer is not None:
            self._timer.cancel()


class AccountedWorkload(Workload):
    """One more kind of work on streams that shares the account of passes."""

    def __init__(self, passes: PassWorkload, work: type[AccountedStreamWork]) -> None:
        self._passes = passes
        self._work = work

    def accept(self, stream: ClientStream) -> AccountedStreamWork:
        """See Workload.accept."""
        return self._work(self._passes, stream)


class PassStreamWork(AccountedStreamWork):
    """Takes one pass at a time from a stream.

    The memory that the pass needs on its way is counted as a whole when it is asked for.
    """

    def __init__(self, passes: PassWorkload, stream: ClientStream) -> None:
        super().__init__(passes, stream)
        self._asked: _OpenPass | None = None

    @property
    def handlers(self) -> Mapping[type[Message], Handler]:
        return {Pass: self._take_pass, PassPiece: self._take_piece}

    @property
    def is_busy(self) -> bool:
        """Whether a pass is computed or answered."""
        return self._asked is not None and self._asked.job is not None

    def _take_pass(self, message: Pass) -> None:
        """Begin a pass, or answer why not."""
        if self._asked is not None:
            raise RemoteProtocolError("a stream can run one pass at a time")
        try:
            self._asked = asked = self._admit(message, self._stream.tenant)
        except RefusedError as error:
            self._refuse(message.pass_id, error)
            return
        self._stream.touch()
        self._timer = asyncio.get_running_loop().call_later(_UPLOAD_SECONDS, self._give_up, asked)

    def end(self) -> None:
        """Drop the pass: nobody is left to read its answer."""
        asked = self._asked
        if asked is None:
            return
        self._stop_timers()
        if asked.job is None or asked.job.future.done():
            self._forget(asked)
        else:
            # Its tensors are in memory until the compute thread has let go of them.
            asked.job.released.add_done_callback(lambda _: self._forget(asked))
            self._passes.compute.drop_pass(asked.job)

    def _take_piece(self, piece: PassPiece) -> bool:
        """Take a piece, or return that it is of no pass."""
        asked = self._asked
        if asked is None or piece.pass_id != asked.work.message.pass_id:
            return False
        asked.reader.take(piece)
        self._stream.touch()
        if asked.reader.is_complete:
            self._begin_computing(asked)
        return True

    def _admit(self, message: Pass, tenant: Tenant) -> _OpenPass:
        passes, resources = self._passes, self._passes.resources
        engine = passes.engine
        if passes.is_draining:
            raise RefusedError(ErrorCode.DRAINING, "the peer is leaving its blocks", BUSY_SECONDS)
        if not resources.budget.num_bytes:
            raise RefusedError(ErrorCode.OUT_OF_MEMORY, "this peer has no memory for training")
        if message.model_id != resources.model_id:
            raise RefusedError(ErrorCode.WRONG_MODEL, "this peer serves another model")
        if not engine.span.covers(message.span):
            raise RefusedError(
                ErrorCode.WRONG_SPAN, f"this peer hosts blocks {engine.span}, not {message.span}"
            )
        if message.num_tokens > engine.spec.max_positions:
            raise RefusedError(
                ErrorCode.TOO_LONG,
                f"the model handles {engine.spec.max_positions} tokens, not {message.num_tokens}",
            )
        kept = find_kept(message, resources.adapter_store, tenant)
        accumulated = find_accumulated(message, kept)
        adapters = cut_adapters(message, kept)
        num_bytes, work_bytes = self._count_bytes(message, adapters)
        passes.tensors.check_room_for(tenant, num_bytes)
        passes.tensors.count(tenant, num_bytes)
        passes.begin()
        for one in kept.values():
            resources.adapter_store.use(one, tenant)
        width = engine.spec.hidden_size
        reader = PiecesReader(list_question_slots(message), width)
        work = WireWork(message, reader.tensors, width, adapters, accumulated)
        return _OpenPass(work, tenant, reader, num_bytes, work_bytes, kept.values())

    def _count_bytes(self, message: Pass, adapters: Adapters) -> tuple[int, int]:
        """Return the bytes of a pass's tensors, and of computing it; or refuse it as too large."""
        engine, budget = self._passes.engine, self._passes.resources.budget
        vector_bytes = engine.spec.hidden_size * _FLOAT_BYTES
        adapter_bytes = check_adapters(
            message, adapters, engine.spec.hidden_size, budget.max_gradient_bytes
        )
        slots = *list_question_slots(message).values(), *list_answer_slots(message).values()
        num_bytes = sum(slots) * vector_bytes
        text_bytes = num_bytes - message.adapter_vectors * vector_bytes
        work_bytes = engine.passes.estimate_bytes(
            len(message.span),
            message.num_rows,
            message.num_tokens,
            is_backward=message.kind is PassKind.BACKWARD,
        )
        has_room = text_bytes <= budget.max_tensor_bytes and work_bytes <= budget.max_work_bytes
        work_bytes += adapter_bytes
        if not has_room or work_bytes > self._passes.resources.read_free_bytes():
            raise RefusedError(
                ErrorCode.OUT_OF_MEMORY,
                f"a pass of {message.num_rows} x {message.num_tokens} tokens is more than this "
                "peer has memory for; send smaller microbatches",
            )
        return num_bytes, work_bytes

    def _give_up(self, asked: _OpenPass) -> None:
        """Refuse a pass that is on its way for too long."""
        self._forget(asked)
        detail = f"the pass did not come within {_UPLOAD_SECONDS:.0f} s; send smaller microbatches"
        self._refuse(asked.work.message.pass_id, RefusedError(ErrorCode.OUT_OF_MEMORY, detail))

    def _begin_computing(self, asked: _OpenPass) -> None:
        message, compute = asked.work.message, self._passes.compute
        run = partial(run_pass, self._passes.engine.passes, asked.work)
        engine = self._passes.engine
        cost = count_cost(asked.work, engine.num_weight_bytes // len(engine.span))
        asked.job = compute.submit_pass(run, cost, asked.tenant, asked.work_bytes)
        asked.job.future.add_done_callback(partial(self._answer, asked))
        self._stop_timers()
        self._keep_alive.begin(message.pass_id)

    def _answer(self, asked: _OpenPass, computing: asyncio.Future[ComputedPass]) -> None:
        if computing.cancelled() or self._asked is not asked:
            return  # the stream is over
        self._stop_timers()
        pass_id, error = asked.work.message.pass_id, computing.exception()
        if error is not None:
            self._forget(asked)
            self._refuse(pass_id, error)
            return
        computed = computing.result()
        frames: list[bytes] = computed.result
        # The answer stays in the account of passes until it is sent: it is no smaller for those
        # who read slowly, and steps of others need the room for what is pending.
        self._recount(asked, sum(map(len, frames)))
        for frame in frames:
            self._answers.put(frame)
        # Before the last word, upon which the client may ask for the next pass.
        self._answers.put_mark(lambda: self._forget(asked))
        passed = Passed(pass_id, computed.queue_seconds, computed.compute_seconds)
        self._answers.say(passed)

    def _recount(self, asked: _OpenPass, num_bytes: int) -> None:
        self._passes.tensors.count(asked.tenant, num_bytes - asked.num_bytes)
        asked.num_bytes = num_bytes

    def _forget(self, asked: _OpenPass) -> None:
        self._stop_timers()
        self._asked = None
        self._stream.touch()
        self._recount(asked, 0)
        for kept in asked.kept:
            self._store.leave(kept, asked.tenant)
        self._passes.end()
