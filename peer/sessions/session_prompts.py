"""The deep prompts of the sessions that one stream opens: they come in pieces behind `Open`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ...kernels.wire_tensors import decode_as, has_only_finite
from ...protocol.errors import ErrorCode, RefusedError
from ...protocol.fair_share import SharedBytes, Tenant
from ...protocol.ids import SessionId
from ...protocol.messages.fields import Message
from ...protocol.messages.passes import PassPiece, PiecesReader, Slot
from ...protocol.messages.session import Open
from ...protocol.tensors import WireTensor
from ..engine.compute_thread import ComputeThread
from ..engine.engine import Engine
from ..streams.client_stream import Handler
from .held_session import HeldSession

_FLOAT_BYTES = 4


@dataclass
class _Prompts:
    """Prompts that come, or have come and wait for their session."""

    message: Open
    tenant: Tenant
    reader: PiecesReader
    num_bytes: int
    read_LBPH: torch.Tensor | None = None


class SessionPrompts:
    """Keeps `Open` back until its prompts are here, so that no step can overtake them."""

    def __init__(
        self,
        engine: Engine,
        compute: ComputeThread,
        memory: SharedBytes,
        note_change: Callable[[], None],
    ) -> None:
        """`note_change` is called when prompts are forgotten: the peer may be empty then."""
        self._engine = engine
        self._compute = compute
        self._memory = memory
        self._note_change = note_change
        self._prompts: dict[SessionId, _Prompts] = {}

    def __len__(self) -> int:
        """Return how many sessions have prompts that they do not hold yet."""
        return len(self._prompts)

    def expect(self, message: Open, tenant: Tenant) -> bool:
        """Keep back an `Open` that announces prompts, and count them; False if it has none.

        Raises RefusedError when there is no room, or when they were announced already.
        """
        if message.session in self._prompts:
            raise RefusedError(ErrorCode.BAD_FRAME, "the session is open already")
        if not message.prompt_tokens:
            return False
        width = self._engine.spec.hidden_size
        num_vectors = len(message.span) * message.prompt_rows * message.prompt_tokens
        num_bytes = num_vectors * width * _FLOAT_BYTES
        self._memory.check_room_for(tenant, num_bytes)
        self._memory.count(tenant, num_bytes)
        reader = PiecesReader({Slot.PROMPTS: num_vectors}, width)
        self._prompts[message.session] = _Prompts(message, tenant, reader, num_bytes)
        return True

    def make_handlers(
        self, open_session: Callable[[Open], Awaitable[None]]
    ) -> Mapping[type[Message], Handler]:
        """Return what takes pieces, and opens a session behind the last of its own.

        Raises RemoteProtocolError for a piece that is not the next one of its session.
        """

        def take(piece: PassPiece) -> Awaitable[None] | bool:
            prompts = self._prompts.get(piece.pass_id)
            if prompts is None:
                return False
            prompts.reader.take(piece)
            return open_session(prompts.message) if prompts.reader.is_complete else True

        return {PassPiece: take}

    async def read(self, message: Open) -> None:
        """Decode the prompts of a session, on a thread of its own: they may be 144 MiB.

        Raises RefusedError when they are no prompts.
        """
        prompts = self._prompts.get(message.session)
        if prompts is None:
            return
        pieces = prompts.reader.tensors[Slot.PROMPTS]
        shape = len(message.span), message.prompt_rows, -1
        read_LBPH = await asyncio.to_thread(_decode, pieces, shape, self._engine.dtype)
        pieces.clear()
        # Devices belong to the compute thread: it may be capturing what they do.
        placing = self._compute.call(partial(self._engine.place_prompts, read_LBPH))
        prompts.read_LBPH = await placing

    def give(self, session: SessionId, held: HeldSession) -> None:
        """Give a session that is open its prompts; they count until it is closed."""
        prompts = self._prompts.pop(session, None)
        if prompts is not None:
            held.cache.prompts_LBPH = prompts.read_LBPH
            held.num_prompt_bytes = prompts.num_bytes

    def forget(self, session: SessionId) -> None:
        """Forget the prompts of a session that is not opened."""
        prompts = self._prompts.pop(session, None)
        if prompts is not None:
            self._memory.count(prompts.tenant, -prompts.num_bytes)
            self._note_change()

    def end(self) -> None:
        """Forget all that no session holds: the stream is over."""
        for session in list(self._prompts):
            self.forget(session)


def _decode(
    pieces: Sequence[WireTensor], shape: tuple[int, int, int], dtype: torch.dtype
) -> torch.Tensor:
    decoded = [decode_as(piece.dtype.name, piece.data, piece.shape)[0] for piece in pieces]
    prompts_LBPH = torch.cat(decoded).unflatten(0, shape)
    if not has_only_finite(prompts_LBPH):
        raise RefusedError(ErrorCode.BAD_VALUES, "the deep prompts are not finite")
    return prompts_LBPH.to(dtype)
