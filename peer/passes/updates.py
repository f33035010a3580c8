"""Adapters that this peer trains for a client: measured, updated and handed out on one stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import safetensors.torch
from torch import Tensor

from ...kernels.pauses import GiveWay
from ...protocol.errors import ErrorCode, RefusedError, RemoteProtocolError
from ...protocol.fair_share import BUSY_SECONDS, Tenant
from ...protocol.ids import UploadId
from ...protocol.messages.adapters import (
    KEEP_SECONDS,
    AdapterFetch,
    AdapterHead,
    AdapterKept,
    AdapterMeasure,
    AdapterMeasured,
    AdapterUpdate,
    cut_adapter,
    make_updated_id,
)
from ...protocol.messages.fields import Message
from ..engine.adapters.adapter_store import KeptAdapter
from ..engine.adapters.trained_adapter import TrainedAdapter
from ..streams.client_stream import ClientStream, Handler
from .pass_workload import AccountedStreamWork, PassWorkload

_NUMBERS_PER_COST = 2**15
"""To update so many takes about as long as a token through a block of some width."""

TrainingMessage = AdapterMeasure | AdapterUpdate | AdapterFetch


class UpdateStreamWork(AccountedStreamWork):
    """Does one thing at a time for a stream, in turn with passes. A repeated update is one."""

    def __init__(self, passes: PassWorkload, stream: ClientStream) -> None:
        super().__init__(passes, stream)
        self._task: asyncio.Task[None] | None = None
        self._unsent_bytes = 0  # of answers, which count until they are sent

    @property
    def handlers(self) -> Mapping[type[Message], Handler]:
        return dict.fromkeys((AdapterMeasure, AdapterUpdate, AdapterFetch), self._take)

    @property
    def is_busy(self) -> bool:
        """Whether something is done."""
        return self._task is not None

    def _take(self, message: TrainingMessage) -> None:
        """Begin with what is asked, or answer why not.

        Raises RemoteProtocolError while something else is asked.
        """
        if self._task is not None:
            raise RemoteProtocolError("a stream can run one request about an adapter at a time")
        tenant = self._stream.tenant
        if isinstance(message, AdapterUpdate) and self._store.has(make_updated_id(message), tenant):
            self._answers.say(_make_kept(message))
            return
        try:
            is_fetched = isinstance(message, AdapterFetch)
            kept = self._store.find(
                message.adapter if is_fetched else message.gradients.adapter, tenant
            )
            trained = kept.trained
            if trained is None:
                detail = "this peer was not asked to train the adapter"
                raise RefusedError(ErrorCode.BAD_VALUES, detail)
            self._check_memory(trained, message)
        except RefusedError as error:
            self._refuse(message.pass_id, error)
            return
        self._passes.begin()
        self._keep_alive.begin(message.pass_id)
        self._task = self._stream.begin(self._work(message, tenant, kept, trained))
        self._task.add_done_callback(self._finish)

    def stop(self) -> None:
        """Give up what nobody waits for any more."""
        if self._task is not None:
            self._task.cancel()

    def end(self) -> None:
        """Count nothing that was not sent."""
        self._count_unsent(-self._unsent_bytes)

    def _check_memory(self, trained: TrainedAdapter, message: TrainingMessage) -> None:
        if isinstance(message, AdapterMeasure):
            return
        num_bytes = (1 + len(trained.moments)) * trained.adapter.num_bytes
        if num_bytes > self._passes.resources.read_free_bytes():
            raise RefusedError(
                ErrorCode.NO_ROOM_FOR_ADAPTER,
                f"this peer has no {num_bytes} bytes free for an update; try again later",
                BUSY_SECONDS,
            )

    async def _work(
        self, message: TrainingMessage, tenant: Tenant, kept: KeptAdapter, trained: TrainedAdapter
    ) -> None:
        try:
            if isinstance(message, AdapterMeasure):
                sum_squares = partial(trained.accumulated.sum_squares, message.gradients)
                square_sum: float = await self._run(sum_squares, tenant, kept, trained)
                self._answers.say(AdapterMeasured(message.pass_id, square_sum))
            elif isinstance(message, AdapterUpdate):
                update = partial(_update, trained, message)
                updated: TrainedAdapter = await self._run(update, tenant, kept, trained)
                names = message.gradients.adapter, make_updated_id(message)
                self._store.replace(*names, tenant, updated)
                self._answers.say(_make_kept(message))
            else:
                await self._fetch(message, tenant, kept, trained)
        except Exception as error:  # noqa: BLE001 - `_refuse` logs it
            self._refuse(message.pass_id, error)

    async def _fetch(
        self, message: AdapterFetch, tenant: Tenant, kept: KeptAdapter, trained: TrainedAdapter
    ) -> None:
        """Queue all files of an adapter, which count like the answers of passes until sent."""
        num_bytes = (1 + len(trained.moments)) * trained.adapter.num_bytes
        self._passes.tensors.check_room_for(tenant, num_bytes)
        self._count_unsent(num_bytes)
        try:
            matrices = await self._run(trained.copy_matrices, tenant, kept, trained)
            files = await asyncio.to_thread(_encode_files, matrices)
        except Exception:
            self._count_unsent(-num_bytes)
            raise
        head = AdapterHead(
            UploadId(message.pass_id),
            message.adapter,
            b"{}",
            len(files),
            optimizer=trained.kind,
            num_updates=trained.num_updates,
        )
        self._answers.say(head)
        for piece in cut_adapter(head.upload_id, files):
            self._answers.say(piece)
        self._answers.put_mark(partial(self._count_unsent, -num_bytes))

    def _count_unsent(self, num_bytes: int) -> None:
        """Count an answer; or no longer one, negative, that was sent or that nobody will read."""
        self._unsent_bytes += num_bytes
        self._passes.tensors.count(self._stream.tenant, num_bytes)

    async def _run(
        self,
        run: Callable[[GiveWay], Any],
        tenant: Tenant,
        kept: KeptAdapter,
        trained: TrainedAdapter,
    ) -> Any:
        """Return what comes of it when its turn has come on the compute thread."""
        compute, adapter_store = self._passes.compute, self._store
        cost = max(1, trained.adapter.num_numbers // _NUMBERS_PER_COST)
        num_bytes = (1 + len(trained.moments)) * trained.adapter.num_bytes
        adapter_store.use(kept, tenant)
        job = compute.submit_pass(run, cost, tenant, num_bytes)
        # However it ends, the thread has let go of the adapter then.
        job.released.add_done_callback(lambda _: adapter_store.leave(kept, tenant))
        try:
            await asyncio.wait([job.future])
            await asyncio.wait([job.released])
            return job.future.result().result
        finally:
            if not job.released.done():
                compute.drop_pass(job)

    def _finish(self, task: asyncio.Task[None]) -> None:
        self._keep_alive.stop()
        self._task = None
        self._stream.touch()
        self._passes.end()


def _update(trained: TrainedAdapter, message: AdapterUpdate, give_way: GiveWay) -> TrainedAdapter:
    return trained.update(message.gradients, message.settings, message.factor, give_way)


def _encode_files(matrices: Sequence[Mapping[str, Tensor]]) -> bytes:
    """Return one safetensors file after the other; those of the same names have one size."""
    return b"".join(safetensors.torch.save(dict(sorted(file.items()))) for file in matrices)


def _make_kept(message: AdapterUpdate) -> AdapterKept:
    return AdapterKept(UploadId(message.pass_id), KEEP_SECONDS)
