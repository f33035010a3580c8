"""Announcements as a workload: this peer tells whoever asks which other peers it knows."""

from __future__ import annotations

import random
from collections.abc import Mapping

from ...protocol.errors import RemoteProtocolError
from ...protocol.ids import ModelId
from ...protocol.messages.codec import encode_frame
from ...protocol.messages.fields import Message
from ...protocol.messages.records import RecordFetch
from ...protocol.net.clock import Clock
from ...protocol.net.network import Presence
from .client_stream import ClientStream, Handler, StreamWork
from .service import Workload


class RecordWorkload(Workload):
    """Answers from what the peer's directory knows of one model; asks nobody."""

    def __init__(self, presence: Presence, model_id: ModelId, clock: Clock) -> None:
        self._model_id = model_id
        self._records = presence.directory.records
        self._clock = clock
        self._rng = random.Random(presence.identity.derive_secret("shoal told records"))

    def accept(self, stream: ClientStream) -> StreamWork:
        """See Workload.accept."""
        return _RecordStreamWork(self, stream)

    def answer(self, fetch: RecordFetch, stream: ClientStream) -> None:
        """Queue the answer to a question of a stream. Raises RefusedError."""
        answer = self._records.answer(
            stream.tenant.address, self._model_id, fetch, self._clock.wall(), self._rng
        )
        stream.answers.post(encode_frame(answer))


class _RecordStreamWork(StreamWork):
    """One answer on each stream."""

    def __init__(self, workload: RecordWorkload, stream: ClientStream) -> None:
        self._workload = workload
        self._stream = stream
        self._has_answered = False

    @property
    def handlers(self) -> Mapping[type[Message], Handler]:
        return {RecordFetch: self._answer}

    def _answer(self, fetch: RecordFetch) -> None:
        if self._has_answered:
            raise RemoteProtocolError("announcements can be asked for once on a stream")
        self._has_answered = True
        self._workload.answer(fetch, self._stream)
