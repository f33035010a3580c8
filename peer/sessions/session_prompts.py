"""The deep prompts of the sessions that one stream opens: they come in pieces behind `Open`."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ...kernels.wire_tensors import decode_as, has_only_finite
from ...protocol import limits
from ...protocol.errors import ErrorCode, RefusedError
from ...protocol.fair_share import SharedBytes, Tenant
from ...protocol.ids import SessionId
from ...protocol.messages.fields import Message
from ...protocol.messages.passes import PassPiece, PiecesReader, Slot
from ...protocol.messages.session import Open
from ...protocol.spans import Span
from ..engine.engine import Engine
from ..streams.client_stream import Answer, AnswerQueue, Handler, encode_refusal
from .held_session import HeldSession

_FLOAT_BYTES = 4


@dataclass
class _Coming:
    """Prompts on their way, and the session that waits for them, once there is one."""

    span: Span
    num_rows: int
    """One stands for all rows."""
    tenant: Tenant
    reader: PiecesReader
    num_bytes: int
    opened: asyncio.Future[bytes]
    """The answer to send when all prompts have arrived."""
    held: HeldSession | None = None
    frame: bytes = b""


class SessionPrompts:
    """Keeps `Opened` back until the prompts are here, so that no step can overtake them."""

    def __init__(self, engine: Engine, memory: SharedBytes, answers: AnswerQueue) -> None:
        self._engine = engine
        self._memory = memory
        self._answers = answers
        self._coming: dict[SessionId, _Coming] = {}
        self._refused: deque[SessionId] = deque(maxlen=limits.MAX_SESSIONS_PER_STREAM)

    def expect(self, message: Open, tenant: Tenant) -> None:
        """Count the prompts that an `Open` announces; raises RefusedError when there is no room."""
        if not message.prompt_tokens or message.session in self._coming:
            return
        self._refused.append(message.session)  # unless all is well
        width = self._engine.spec.hidden_size
        num_vectors = len(message.span) * message.prompt_rows * message.prompt_tokens
        num_bytes = num_vectors * width * _FLOAT_BYTES
        self._memory.check_room_for(tenant, num_bytes)
        self._memory.count(tenant, num_bytes)
        self._refused.pop()
        reader = PiecesReader({Slot.PROMPTS: num_vectors}, width)
        opened = asyncio.get_running_loop().create_future()
        self._coming[message.session] = _Coming(
            message.span, message.prompt_rows, tenant, reader, num_bytes, opened
        )

    @property
    def handlers(self) -> Mapping[type[Message], Handler]:
        """See StreamWork.handlers."""
        return {PassPiece: self.take}

    def take(self, piece: PassPiece) -> bool:
        """Take a piece, or return that it is none of these.

        Raises RemoteProtocolError when it is not the next one of its session.
        """
        session = piece.pass_id
        coming = self._coming.get(session)
        if coming is None:
            return session in self._refused
        coming.reader.take(piece)
        self._finish(session, coming)
        return True

    def answer(self, session: SessionId, held: HeldSession, frame: bytes) -> None:
        """Answer `Open` with `Opened`, now or when the prompts are here."""
        opened = self.hold_back(session, held, frame)
        if opened is None:
            self._answers.put(frame)
            return
        answer: Answer = asyncio.get_running_loop().create_future()
        self._answers.put(answer)
        opened.add_done_callback(
            lambda done: self._answers.deliver(answer, None if done.cancelled() else done.result())
        )

    async def wait(self, session: SessionId, held: HeldSession, frame: bytes) -> bytes:
        """Return `Opened` when the prompts are here."""
        opened = self.hold_back(session, held, frame)
        return frame if opened is None else await opened

    def hold_back(
        self, session: SessionId, held: HeldSession, frame: bytes
    ) -> asyncio.Future[bytes] | None:
        """Keep `Opened` for a session that expects prompts; None: there is nothing to wait for."""
        coming = self._coming.get(session)
        if coming is None:
            return None
        coming.held, coming.frame = held, frame
        held.num_prompt_bytes = coming.num_bytes
        self._finish(session, coming)
        return coming.opened

    def refuse(self, session: SessionId) -> None:
        """Forget the prompts of a session that is not opened; pieces may be on their way still."""
        coming = self._coming.pop(session, None)
        if coming is not None:
            self._refused.append(session)
            self._release(coming)

    def end(self) -> None:
        """Forget all that have not come: the stream is over."""
        for session in list(self._coming):
            self.refuse(session)

    def _finish(self, session: SessionId, coming: _Coming) -> None:
        """Give prompts that have all come to their session."""
        if coming.held is None or not coming.reader.is_complete:
            return
        del self._coming[session]
        pieces = coming.reader.tensors[Slot.PROMPTS]
        decoded = [decode_as(piece.dtype.name, piece.data, piece.shape)[0] for piece in pieces]
        shape = len(coming.span), coming.num_rows, -1
        prompts_LBPH = torch.cat(decoded).unflatten(0, shape)
        if not has_only_finite(prompts_LBPH):
            error = RefusedError(ErrorCode.BAD_VALUES, "the deep prompts are not finite")
            coming.opened.set_result(encode_refusal(session, 0, error))
            return
        coming.held.cache.prompts_LBPH = self._engine.place_prompts(prompts_LBPH)
        coming.opened.set_result(coming.frame)

    def _release(self, coming: _Coming) -> None:
        coming.opened.cancel()
        if coming.held is None:  # else they count until it is closed
            self._memory.count(coming.tenant, -coming.num_bytes)
