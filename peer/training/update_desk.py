"""Adapters that this peer trains for a client: measured, updated and handed out on one stream."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import safetensors.torch
from torch import Tensor

from ...kernels.pauses import GiveWay
from ...protocol.errors import ErrorCode, RefusedError, RemoteProtocolError
from ...protocol.fair_share import BUSY_SECONDS, Holder
from ...protocol.ids import UploadId
from ...protocol.messages.adapter_contents import KEEP_SECONDS, cut_adapter
from ...protocol.messages.adapters import (
    AdapterFetch,
    AdapterHead,
    AdapterKept,
    AdapterMeasure,
    AdapterMeasured,
    AdapterUpdate,
    make_updated_id,
)
from ...protocol.wire.codec import encode_frame
from ..accounts.adapter_shelf import Kept
from ..engine.adapters.trained_adapter import TrainedAdapter
from ..sessions.answer_queue import AnswerQueue
from ..sessions.answers import encode_refusal
from ..sessions.signs import Signs

if TYPE_CHECKING:
    from ..streams.service import Service

_logger = logging.getLogger(__name__)

_NUMBERS_PER_COST = 2**15
"""To update so many takes about as long as a token through a block of some width."""

_FLOAT_BYTES = 4

TrainingMessage = AdapterMeasure | AdapterUpdate | AdapterFetch


class UpdateDesk:
    """Does one thing at a time for a stream, in turn with passes. A repeated update is one."""

    def __init__(self, service: Service, answers: AnswerQueue) -> None:
        self._service = service
        self._answers = answers
        self._signs = Signs(service.compute, answers)
        self._task: asyncio.Task[None] | None = None
        self._unsent: tuple[Holder, int] | None = None  # an answer that counts until it is sent
        self._active_at = service.clock.now()

    @property
    def active_at(self) -> float:
        """When something was last asked here; now, while it is done."""
        return self._service.clock.now() if self._task is not None else self._active_at

    def take(self, message: TrainingMessage, holder: Holder) -> None:
        """Begin with what is asked, or answer why not.

        Raises RemoteProtocolError while something else is asked.
        """
        if self._task is not None:
            raise RemoteProtocolError("a stream asks for one thing about an adapter at a time")
        shelf = self._service.adapters
        if isinstance(message, AdapterUpdate) and shelf.has(make_updated_id(message), holder):
            self._answers.put(_encode_kept(message))
            return
        try:
            is_fetched = isinstance(message, AdapterFetch)
            kept = shelf.find(message.adapter if is_fetched else message.gradients.adapter, holder)
            trained = kept.trained
            if trained is None:
                detail = "this peer was not asked to train the adapter"
                raise RefusedError(ErrorCode.BAD_VALUES, detail)
            self._check_memory(trained, message)
        except RefusedError as error:
            self._answers.put(encode_refusal(message.pass_id, 0, error))
            return
        self._service.num_passes += 1
        self._signs.begin(message.pass_id)
        self._task = asyncio.create_task(self._work(message, holder, kept, trained))
        self._task.add_done_callback(self._finish)

    def end(self) -> None:
        """Give up what nobody waits for any more."""
        if self._task is not None:
            self._task.cancel()
        else:
            self._note_sent()

    def _check_memory(self, trained: TrainedAdapter, message: TrainingMessage) -> None:
        if isinstance(message, AdapterMeasure):
            return
        num_bytes = (1 + len(trained.moments)) * trained.adapter.num_bytes
        if num_bytes > self._service.read_free_bytes():
            raise RefusedError(
                ErrorCode.NO_ROOM_FOR_ADAPTER,
                f"this peer has no {num_bytes} bytes of memory for an update at present",
                BUSY_SECONDS,
            )

    async def _work(
        self, message: TrainingMessage, holder: Holder, kept: Kept, trained: TrainedAdapter
    ) -> None:
        try:
            if isinstance(message, AdapterMeasure):
                measure = partial(trained.gathered.measure, message.gradients)
                square_sum: float = await self._compute(measure, holder, kept, trained)
                self._answers.put(encode_frame(AdapterMeasured(message.pass_id, square_sum)))
            elif isinstance(message, AdapterUpdate):
                update = partial(_update, trained, message)
                updated: TrainedAdapter = await self._compute(update, holder, kept, trained)
                names = message.gradients.adapter, make_updated_id(message)
                self._service.adapters.replace(*names, holder, updated)
                self._answers.put(_encode_kept(message))
            else:
                await self._fetch(message, holder, kept, trained)
        except RefusedError as error:
            self._note_sent()
            self._answers.put(encode_refusal(message.pass_id, 0, error))

    async def _fetch(
        self, message: AdapterFetch, holder: Holder, kept: Kept, trained: TrainedAdapter
    ) -> None:
        """Queue all files of an adapter, which count like the answers of passes until sent."""
        passes = self._service.passes
        num_bytes = (1 + len(trained.moments)) * trained.adapter.num_bytes
        passes.check_room_for(holder, num_bytes)
        passes.count(holder, num_bytes)
        self._unsent = holder, num_bytes
        matrices = await self._compute(trained.copy_matrices, holder, kept, trained)
        files = await asyncio.to_thread(_encode_files, matrices)
        head = AdapterHead(
            UploadId(message.pass_id),
            message.adapter,
            b"{}",
            len(files),
            optimizer=trained.kind,
            num_updates=trained.num_updates,
        )
        self._answers.put(encode_frame(head))
        for piece in cut_adapter(head.upload_id, files):
            self._answers.put(encode_frame(piece))
        self._answers.put_mark(self._note_sent)

    def _note_sent(self) -> None:
        """Count an answer no longer that was sent, or that nobody will read."""
        if self._unsent is not None:
            holder, num_bytes = self._unsent
            self._service.passes.count(holder, -num_bytes)
            self._unsent = None

    async def _compute(
        self, run: Callable[[GiveWay], Any], holder: Holder, kept: Kept, trained: TrainedAdapter
    ) -> Any:
        """Return what comes of it when its turn has come on the compute thread."""
        compute, shelf = self._service.compute, self._service.adapters
        cost = max(1, trained.adapter.num_numbers // _NUMBERS_PER_COST)
        num_bytes = (1 + len(trained.moments)) * trained.adapter.num_bytes
        shelf.use(kept, holder)
        job = compute.submit_pass(run, cost, holder, num_bytes)
        # However it ends, the thread has let go of the adapter then.
        job.released.add_done_callback(lambda _: shelf.leave(kept, holder))
        try:
            await asyncio.wait([job.future])
            await asyncio.wait([job.released])
            return job.future.result().result
        finally:
            if not job.released.done():
                compute.drop_pass(job)

    def _finish(self, task: asyncio.Task[None]) -> None:
        self._signs.stop()
        if task.cancelled():
            self._note_sent()
        self._task, self._active_at = None, self._service.clock.now()
        self._service.num_passes -= 1
        self._service.note_change()
        error = None if task.cancelled() else task.exception()
        if error is not None:
            _logger.error("an adapter could not be trained: %r", error)


def _update(trained: TrainedAdapter, message: AdapterUpdate, give_way: GiveWay) -> TrainedAdapter:
    return trained.update(message.gradients, message.settings, message.factor, give_way)


def _encode_files(matrices: Sequence[Mapping[str, Tensor]]) -> bytes:
    """Return one safetensors file after the other; those of the same names have one size."""
    return b"".join(safetensors.torch.save(dict(sorted(file.items()))) for file in matrices)


def _encode_kept(message: AdapterUpdate) -> bytes:
    return encode_frame(AdapterKept(UploadId(message.pass_id), KEEP_SECONDS))
