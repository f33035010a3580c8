"""Adapters that a client brings on one stream: pieces come in, and are read when all are here."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from ...protocol.errors import ErrorCode, RefusedError, RemoteProtocolError
from ...protocol.fair_share import BUSY_SECONDS, Tenant
from ...protocol.ids import UploadId, make_adapter_id
from ...protocol.messages.adapters import (
    KEEP_SECONDS,
    AdapterHead,
    AdapterKept,
    AdapterPiece,
    AdapterReader,
    AdapterWithdrawal,
    UploadPace,
)
from ...protocol.messages.fields import Message
from ...protocol.versions import OPTIMIZER_VERSION
from ..engine.adapters.adapter import Adapter
from ..engine.adapters.adapter_file import read_adapter
from ..engine.adapters.adapter_store import KeptAdapter
from ..engine.adapters.trained_adapter import TrainedAdapter
from ..engine.engine import Engine
from ..streams.client_stream import ClientStream, Handler
from .fetches import read_published
from .pass_workload import AccountedStreamWork, PassWorkload
from .wire_passes import check_trained


@dataclass
class _IncomingAdapter:
    """An adapter on its way, from its head until it is kept or refused."""

    head: AdapterHead
    tenant: Tenant
    reader: AdapterReader
    pace: UploadPace
    reading: asyncio.Future[Adapter | TrainedAdapter] | None = None
    files: Mapping[int, bytearray] = field(default_factory=dict[int, bytearray])
    """The leaves of a publication, once they are here."""

    @property
    def num_bytes(self) -> int:
        """Bytes that count for it; an adapter trained here includes moments and gradients."""
        head = self.head
        if head.manifest is not None:
            return head.manifest.num_bytes + head.num_bytes
        num_tensors = 2 + head.optimizer.num_moments if head.optimizer else 1
        return len(head.config) + head.num_bytes // head.num_files * num_tensors


class UploadStreamWork(AccountedStreamWork):
    """Takes one adapter at a time from a stream. Its memory is counted from the head on."""

    def __init__(self, passes: PassWorkload, stream: ClientStream) -> None:
        super().__init__(passes, stream)
        self._upload: _IncomingAdapter | None = None

    @property
    def handlers(self) -> Mapping[type[Message], Handler]:
        return {
            AdapterHead: self._take_head,
            AdapterPiece: self._take_piece,
            AdapterWithdrawal: self._take_withdrawal,
        }

    @property
    def is_busy(self) -> bool:
        """Whether an adapter comes, or is read."""
        return self._upload is not None

    def _take_withdrawal(self, message: AdapterWithdrawal) -> None:
        """Forget an adapter."""
        if self._store.withdraw(message.adapter, self._stream.tenant):
            self._stream.touch()
        self._answers.say(AdapterKept(UploadId(message.pass_id), 0.0))

    def _take_head(self, message: AdapterHead) -> None:
        """Begin with an adapter, or answer why not."""
        if self._upload is not None:
            raise RemoteProtocolError("a stream can upload one adapter at a time")
        try:
            self._upload = upload = self._admit(message, self._stream.tenant)
        except RefusedError as error:
            self._refuse(message.upload_id, error)
            return
        if upload is None:
            self._say_kept(message.upload_id)
            return
        self._wait_for_more(upload)

    def end(self) -> None:
        """Drop what has not come in full: nobody is left to bring the rest."""
        self._stop_timers()
        if self._upload is not None and self._upload.reading is None:
            self._forget(self._upload)

    def _admit(self, head: AdapterHead, tenant: Tenant) -> _IncomingAdapter | None:
        """Return an adapter that is to come; None for one that its tenant has published here."""
        passes, adapter_store = self._passes, self._store
        if passes.is_draining:
            raise RefusedError(ErrorCode.DRAINING, "the peer is leaving its blocks", BUSY_SECONDS)
        if head.is_published and adapter_store.has(head.adapter, tenant, is_published=True):
            return None
        span = passes.engine.span
        if head.manifest and head.num_bytes != (head.manifest.count_bytes(span) or None):
            detail = f"this peer hosts blocks {span}, and the leaves are those of others"
            raise RefusedError(ErrorCode.WRONG_SPAN, detail)
        check_trained(head.num_trained, passes.resources.budget.max_gradient_bytes)
        upload = _IncomingAdapter(head, tenant, AdapterReader(head), UploadPace(self._clock.now()))
        adapter_store.reserve(tenant, upload.num_bytes, head.replaces)
        return upload

    def _take_piece(self, piece: AdapterPiece) -> None:
        upload = self._upload
        if upload is None or piece.upload_id != upload.head.upload_id:
            return  # it belongs to one that was refused, or is here already
        upload.reader.take(piece)
        upload.pace.note_piece(len(piece.data), self._clock.now())
        if upload.reader.is_complete:
            self._stop_timers()
            if self._stream.version >= OPTIMIZER_VERSION:  # older ones do not expect it
                self._keep_alive.begin(upload.head.upload_id)
            upload.reading = reading = asyncio.create_task(self.read(upload))
            self._passes.readings.add(reading)
            reading.add_done_callback(partial(self._finish, upload))

    async def read(self, upload: _IncomingAdapter) -> Adapter | TrainedAdapter:
        """Read an adapter on a thread of its own: tens of megabytes are checked number by number.

        Neither the event loop nor the compute thread should wait for that.
        """
        passes, head = self._passes, upload.head
        data = await asyncio.to_thread(upload.reader.join)
        if head.manifest is not None:
            try:
                split = head.manifest.split
                upload.files = await asyncio.to_thread(split, passes.engine.span, data)
            except RemoteProtocolError as error:
                raise RefusedError(ErrorCode.BAD_VALUES, str(error)) from None
            return await read_published(passes.engine, passes.compute, head.config, upload.files)
        adapter = await asyncio.to_thread(_read, passes.engine, head, data)
        # Devices belong to the compute thread: it may be capturing what they do.
        return await passes.compute.call(lambda: adapter.move_to(passes.engine.device.torch_device))

    def _finish(
        self, upload: _IncomingAdapter, reading: asyncio.Future[Adapter | TrainedAdapter]
    ) -> None:
        """Keep the adapter, also when the stream is over by now: others may be there."""
        self._passes.readings.discard(reading)
        if reading.cancelled():
            return  # with the event loop
        self._stop_timers()
        head, error = upload.head, reading.exception()
        self._upload = None
        self._stream.touch()
        if error is None:
            self._keep(upload, reading.result())
            self._say_kept(head.upload_id)
            return
        self._store.release(upload.tenant, upload.num_bytes)
        self._refuse(head.upload_id, error)

    def _keep(self, upload: _IncomingAdapter, adapter: Adapter | TrainedAdapter) -> None:
        head, trained = upload.head, None
        if isinstance(adapter, TrainedAdapter):
            trained, adapter = adapter, adapter.adapter
        kept = KeptAdapter(
            head.adapter,
            adapter,
            upload.tenant,
            upload.num_bytes,
            self._clock.now(),
            trained=trained,
            manifest=head.manifest,
            files=upload.files,
        )
        self._store.put(kept, head.is_published)

    def _wait_for_more(self, upload: _IncomingAdapter) -> None:
        """Refuse an adapter that stands still on its way for too long, or comes too slowly."""
        seconds = upload.pace.deadline - self._clock.now()
        if seconds > 0:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(seconds, self._wait_for_more, upload)
            return
        self._forget(upload)
        error = RefusedError(ErrorCode.NO_ROOM_FOR_ADAPTER, "the adapter arrives too slowly")
        self._refuse(upload.head.upload_id, error)

    def _say_kept(self, upload_id: UploadId) -> None:
        self._stream.touch()
        self._answers.say(AdapterKept(upload_id, KEEP_SECONDS))

    def _forget(self, upload: _IncomingAdapter) -> None:
        self._stop_timers()
        self._upload = None
        self._stream.touch()
        self._store.release(upload.tenant, upload.num_bytes)


def _read(engine: Engine, head: AdapterHead, tensors: bytes) -> Adapter | TrainedAdapter:
    """Return the adapter of two files that are what they are called; raises RefusedError."""
    if make_adapter_id(head.config, tensors) != head.adapter:
        raise RefusedError(ErrorCode.BAD_VALUES, "the adapter does not match its digest")
    if not head.optimizer:
        return read_adapter(head.config, tensors, engine.spec, engine.span)
    size = len(tensors) // head.num_files
    files = [
        read_adapter(head.config, tensors[start : start + size], engine.spec, engine.span)
        for start in range(0, len(tensors), size)
    ]
    return TrainedAdapter.begin(files, head.optimizer, head.num_updates)
