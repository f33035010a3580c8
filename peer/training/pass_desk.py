"""The passes of one stream: tensors come in, are computed, and what came of them goes out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ...protocol.errors import ErrorCode, RefusedError, RemoteProtocolError
from ...protocol.fair_share import BUSY_SECONDS, Holder
from ...protocol.ids import PassId
from ...protocol.messages.passes import (
    Pass,
    Passed,
    PassKind,
    PassPiece,
    PiecesReader,
    list_answer_slots,
    list_question_slots,
)
from ...protocol.wire.codec import encode_frame
from ..accounts.adapter_shelf import Kept
from ..engine.adapters.trained_adapter import GatheredGradients
from ..engine.pass_queue import ComputedPass, PassJob
from ..sessions.answer_queue import AnswerQueue
from ..sessions.answers import encode_refusal
from ..sessions.signs import Signs
from .named_adapters import Adapters, check_adapters, cut_adapters, find_gathered, find_kept
from .pass_work import WireWork, run_pass

if TYPE_CHECKING:
    from ..streams.service import Service

_logger = logging.getLogger(__name__)

_UPLOAD_SECONDS = 300.0
"""How long the tensors of a pass may be on their way, while the memory for all of them is kept: 85
MiB, the most in 16 bits, need 286 seconds at 2.5 megabits a second."""

_FLOAT_BYTES = 4

_COSTS = {PassKind.FORWARD: 1, PassKind.BACKWARD: 3}
"""Backward, blocks are computed twice and differentiated."""


@dataclass
class _Asked:
    """The pass of a stream, from the first word until its answer is sent."""

    message: Pass
    holder: Holder
    reader: PiecesReader
    num_bytes: int
    work_bytes: int
    adapters: Adapters
    kept: Collection[Kept]
    gathered: GatheredGradients | None
    job: PassJob | None = None


class PassDesk:
    """Takes one pass at a time from a stream.

    The memory that the pass needs on its way is counted as a whole when it is asked for.
    """

    def __init__(self, service: Service, answers: AnswerQueue) -> None:
        self._service = service
        self._answers = answers
        self._asked: _Asked | None = None
        self._refused: PassId | None = None
        self._timer: asyncio.TimerHandle | None = None  # of the upload's end
        self._signs = Signs(service.compute, answers)
        self._active_at = service.clock.now()

    @property
    def active_at(self) -> float:
        """When a pass was last begun, came further or was over; now, while one is computed or
        answered.
        """
        if self._asked is not None and self._asked.job is not None:
            return self._service.clock.now()
        return self._active_at

    def take(self, message: Pass | PassPiece, holder: Holder) -> None:
        """Begin a pass, or answer why not; or take the next piece of one.

        Raises RemoteProtocolError where neither belongs there.
        """
        if isinstance(message, PassPiece):
            self._take_piece(message)
            return
        if self._asked is not None:
            raise RemoteProtocolError("a stream has one pass at a time")
        try:
            self._asked = asked = self._admit(message, holder)
        except RefusedError as error:
            self._refuse(message.pass_id, error)
            return
        self._active_at = self._service.clock.now()
        self._timer = asyncio.get_running_loop().call_later(_UPLOAD_SECONDS, self._give_up, asked)

    def end(self) -> None:
        """Drop the pass: nobody is left to read its answer."""
        asked = self._asked
        if asked is None:
            return
        self._stop_timer()
        if asked.job is None or asked.job.future.done():
            self._forget(asked)
        else:
            # Its tensors are in memory until the compute thread has let go of them.
            asked.job.released.add_done_callback(lambda _: self._forget(asked))
            self._service.compute.drop_pass(asked.job)

    def _take_piece(self, piece: PassPiece) -> None:
        asked = self._asked
        if asked is None or piece.pass_id != asked.message.pass_id:
            if piece.pass_id != self._refused:
                raise RemoteProtocolError("a piece of a pass that was not asked for")
            return
        asked.reader.take(piece)
        self._active_at = self._service.clock.now()
        if asked.reader.is_complete:
            self._compute(asked)

    def _admit(self, message: Pass, holder: Holder) -> _Asked:
        service, engine = self._service, self._service.engine
        if service.is_draining:
            raise RefusedError(ErrorCode.DRAINING, "the peer leaves its blocks", BUSY_SECONDS)
        if not service.pass_budget.num_bytes:
            raise RefusedError(ErrorCode.OUT_OF_MEMORY, "this peer has no memory for training")
        if message.model_id != service.facts.model_id:
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
        kept = find_kept(message, service.adapters, holder)
        gathered = find_gathered(message, kept)
        adapters = cut_adapters(message, kept)
        num_bytes, work_bytes = self._measure(message, adapters)
        service.passes.check_room_for(holder, num_bytes)
        service.passes.count(holder, num_bytes)
        service.num_passes += 1
        for one in kept.values():
            service.adapters.use(one, holder)
        reader = PiecesReader(list_question_slots(message), engine.spec.hidden_size)
        return _Asked(
            message, holder, reader, num_bytes, work_bytes, adapters, kept.values(), gathered
        )

    def _measure(self, message: Pass, adapters: Adapters) -> tuple[int, int]:
        """Return the bytes of a pass's tensors, and of computing it; or refuse it as too large."""
        engine, budget = self._service.engine, self._service.pass_budget
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
        if not has_room or work_bytes > self._service.read_free_bytes():
            raise RefusedError(
                ErrorCode.OUT_OF_MEMORY,
                f"a pass of {message.num_rows} x {message.num_tokens} tokens is more than this "
                "peer has memory for; send smaller microbatches",
            )
        return num_bytes, work_bytes

    def _refuse(self, pass_id: PassId, error: RefusedError) -> None:
        self._refused = pass_id  # whose pieces are on their way already
        self._answers.put(encode_refusal(pass_id, 0, error))

    def _give_up(self, asked: _Asked) -> None:
        """Refuse a pass that is on its way for too long."""
        self._forget(asked)
        detail = f"the pass did not come within {_UPLOAD_SECONDS:.0f} s; send smaller microbatches"
        self._refuse(asked.message.pass_id, RefusedError(ErrorCode.OUT_OF_MEMORY, detail))

    def _compute(self, asked: _Asked) -> None:
        message = asked.message
        work = WireWork(message, asked.reader.tensors, asked.adapters, asked.gathered)
        run = partial(run_pass, self._service.engine, work)
        cost = message.num_rows * message.num_tokens * len(message.span) * _COSTS[message.kind]
        compute = self._service.compute
        asked.job = compute.submit_pass(run, cost, asked.holder, asked.work_bytes)
        asked.job.future.add_done_callback(partial(self._answer, asked))
        self._stop_timer()
        self._signs.begin(message.pass_id)

    def _answer(self, asked: _Asked, computing: asyncio.Future[ComputedPass]) -> None:
        if computing.cancelled() or self._asked is not asked:
            return  # the stream is over
        self._stop_timer()
        pass_id, error = asked.message.pass_id, computing.exception()
        if error is not None:
            self._forget(asked)
            if not isinstance(error, RefusedError):
                _logger.error("a pass has no answer: %r", error)
                error = RefusedError(ErrorCode.INTERNAL, "the peer failed to answer the pass")
            self._answers.put(encode_refusal(pass_id, 0, error))
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
        self._answers.put(encode_frame(passed))

    def _recount(self, asked: _Asked, num_bytes: int) -> None:
        self._service.passes.count(asked.holder, num_bytes - asked.num_bytes)
        asked.num_bytes = num_bytes

    def _forget(self, asked: _Asked) -> None:
        self._stop_timer()
        self._asked, self._active_at = None, self._service.clock.now()
        self._recount(asked, 0)
        for kept in asked.kept:
            self._service.adapters.leave(kept, asked.holder)
        self._service.num_passes -= 1
        self._service.note_change()

    def _stop_timer(self) -> None:
        self._signs.stop()
        if self._timer is not None:
            self._timer.cancel()
