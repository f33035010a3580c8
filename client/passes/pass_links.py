"""The streams for passes that a client has to its peers: a few to each, used again and again. Over
one, the tensors of a pass are sent, and what comes back is checked.

Tensor suffixes: N vectors of all rows, H hidden.
"""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Mapping,
)
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.wire_tensors import decode_as, encode_as, has_only_finite
from ...protocol.errors import RefusedError, RemoteProtocolError, UnavailableError
from ...protocol.ids import PeerId, SessionId, make_client_token
from ...protocol.messages.adapters import (
    AdapterFetch,
    AdapterHead,
    AdapterKept,
    AdapterMeasure,
    AdapterMeasured,
    AdapterPiece,
    AdapterReader,
    AdapterUpdate,
    AdapterWithdrawal,
    PublicationFetch,
    cut_adapter,
)
from ...protocol.messages.codec import check_kind, encode_frame, read_answer
from ...protocol.messages.fields import Message
from ...protocol.messages.passes import (
    Pass,
    Passed,
    PassPiece,
    PiecesReader,
    Slot,
    choose_answer_dtype,
    cut_vectors,
    list_answer_slots,
    list_question_slots,
)
from ...protocol.messages.session import Queued
from ...protocol.net.clock import AnswerTimeout, Clock
from ...protocol.net.dialling import open_greeted
from ...protocol.net.transport import Stream, Transport
from ...protocol.records.announcements import Announcement
from ...protocol.tensors import WireTensor
from ..concurrency.tasks import Background, KeyedSemaphores
from ..routing.route import Hop

_SILENCE_SECONDS = 4.0
"""A peer that waits or computes says so every second; without a word for so long it is given up."""


MAX_IN_FLIGHT = 2
"""Passes under way at one peer: one is computed while the tensors of the other travel."""

_KEEP_SECONDS = 10.0
"""How long a stream that nobody uses is good for: peers end theirs after twice as long."""


@dataclass(frozen=True)
class PassAnswer:
    """The tensors of an answer, [N, H] each in float32, and how long all were on their way.

    That is what this end has measured: until the peer said that it has got everything, and from
    the first piece of its answer to the last. Times that the peer reports are not used.
    """

    tensors: Mapping[Slot, Tensor]
    way_seconds: float


class PassLink:
    """A stream for one pass at a time. Not to be used again after an error: close it."""

    def __init__(self, clock: Clock, peer: Announcement, stream: Stream) -> None:
        self._clock = clock
        self._stream = stream
        self._name = Hop(peer, peer.span).name
        self.peer = peer
        self.used_at = clock.now()

    def __repr__(self) -> str:
        return f"<PassLink {self._name}>"

    async def ask(
        self,
        asked: Pass,
        tensors: Mapping[Slot, Tensor],
        carrying_seconds: float,
        patience_seconds: float,
    ) -> PassAnswer:
        """Send the tensors [N, H] of a pass, in the dtype of the answer; return what came of them.

        A frame may take `carrying_seconds` on its way, and everything `patience_seconds`, whatever
        the peer says meanwhile. Raises SilentError after that, and when the peer neither takes nor
        says anything for too long, UnavailableError when the stream broke, RefusedError when the
        peer declined, RemoteProtocolError for any other answer.
        """
        timeout_seconds, asked_at = _SILENCE_SECONDS + carrying_seconds, self._clock.now()
        reader = PiecesReader(list_answer_slots(asked), tensors[Slot.HIDDEN].shape[1])
        async with AnswerTimeout(patience_seconds, f"{self._name} takes too long for a pass"):
            await self._send(encode_frame(asked), timeout_seconds)
            for slot, num_vectors in list_question_slots(asked).items():
                vectors_NH = tensors[slot]
                for part in cut_vectors(num_vectors, asked.dtype, vectors_NH.shape[1]):
                    frame = _encode(asked, slot, part, vectors_NH[part.start : part.stop])
                    await self._send(frame, timeout_seconds)
            way_seconds = await self.receive_answer(asked, reader, timeout_seconds) - asked_at
        joined = {slot: _join(pieces) for slot, pieces in reader.tensors.items()}
        if not all(map(has_only_finite, joined.values())):
            raise RemoteProtocolError(f"{self._name} answered with NaN or infinity")
        return PassAnswer(joined, way_seconds)

    async def bring(
        self,
        head: AdapterHead,
        tensors: bytes,
        carrying_seconds: float,
        patience_seconds: float,
    ) -> float:
        """Give the peer an adapter to keep; return for how long it does so unused.

        Takes `patience_seconds` at most, all pieces together. Raises what `ask` does.
        """
        timeout_seconds = _SILENCE_SECONDS + carrying_seconds
        async with AnswerTimeout(patience_seconds, f"{self._name} takes too long for an adapter"):
            # Read from the beginning: what a peer refuses by its head alone need not go there.
            hearing = asyncio.create_task(self._listen(head.upload_id))
            try:
                await self._send(encode_frame(head), timeout_seconds)
                for piece in cut_adapter(head.upload_id, tensors):
                    if hearing.done():
                        break
                    await self._send(encode_frame(piece), timeout_seconds)
                answer = await self._wait(hearing, timeout_seconds)
            except UnavailableError:
                if hearing.done() and not hearing.cancelled():
                    error = hearing.exception()
                    if isinstance(error, RefusedError):
                        raise error from None  # why the peer hung up
                raise
            finally:
                hearing.cancel()
                await asyncio.wait([hearing])
            if isinstance(answer, Queued):
                answer = await self._hear(head.upload_id, timeout_seconds)
        return self._check_kept(head.upload_id, answer)

    def _check_kept(self, asked: SessionId, answer: Message) -> float:
        """Return for how long the peer keeps an adapter, if that is what it has answered."""
        kept = check_kind(answer, AdapterKept, self._name)
        if kept.upload_id != asked:
            raise RemoteProtocolError(f"{self._name} speaks of another adapter")
        return kept.keep_seconds

    async def fetch_square_sum(self, asked: AdapterMeasure, patience_seconds: float) -> float:
        """Return the sum of the squares of accumulated gradients; raises what `ask` does."""
        answer = await self._ask_about_adapter(asked, patience_seconds)
        return check_kind(answer, AdapterMeasured, self._name).square_sum

    async def ask_kept(
        self,
        asked: AdapterUpdate | PublicationFetch | AdapterWithdrawal,
        carrying_seconds: float = 0.0,
        patience_seconds: float | None = None,
    ) -> float:
        """Have the peer do something with an adapter; return for how long it keeps that afterwards.

        Without `patience_seconds`, all of it may take as long as one message. Raises what `ask`
        does.
        """
        seconds = _SILENCE_SECONDS + carrying_seconds
        answer = await self._ask_about_adapter(asked, patience_seconds or seconds, seconds)
        return self._check_kept(asked.pass_id, answer)

    async def _ask_about_adapter(
        self,
        asked: AdapterMeasure | AdapterUpdate | PublicationFetch | AdapterWithdrawal,
        patience_seconds: float,
        timeout_seconds: float = _SILENCE_SECONDS,
    ) -> Message:
        async with AnswerTimeout(patience_seconds, f"{self._name} takes too long for an adapter"):
            await self._send(encode_frame(asked), timeout_seconds)
            return await self._hear(asked.pass_id, timeout_seconds)

    async def fetch_adapter(
        self,
        asked: AdapterFetch,
        most_bytes: int,
        carrying_seconds: float,
        patience_seconds: float,
    ) -> tuple[AdapterHead, bytes]:
        """Return an adapter that the peer trains; raises what `ask` does."""
        timeout_seconds = _SILENCE_SECONDS + carrying_seconds
        async with AnswerTimeout(patience_seconds, f"{self._name} takes too long for an adapter"):
            await self._send(encode_frame(asked), timeout_seconds)
            answer = await self._hear(asked.pass_id, timeout_seconds)
            head = check_kind(answer, AdapterHead, self._name)
            if head.num_bytes > most_bytes:
                raise RemoteProtocolError(f"{self._name} sends an adapter that is too large")
            reader = AdapterReader(head)
            while not reader.is_complete:
                piece = await self._receive(asked.pass_id, timeout_seconds)
                reader.take(check_kind(piece, AdapterPiece, self._name))
            return head, reader.join()

    async def _hear(self, pass_id: SessionId, timeout_seconds: float) -> Message:
        """Return the first thing that is no sign of life."""
        while True:
            message = await self._receive(pass_id, timeout_seconds)
            if not isinstance(message, Queued):
                return message
            if message.session != pass_id:
                raise RemoteProtocolError(f"{self._name} answered with {message!r:.80}")

    async def close(self) -> None:
        """Hang up: the peer drops what it has not answered. Never raises."""
        await self._stream.close()

    async def _send(self, frame: bytes, timeout_seconds: float) -> None:
        async with AnswerTimeout(timeout_seconds, f"{self._name} does not read what is sent"):
            await self._stream.send(frame)

    async def receive_answer(
        self, asked: Pass, reader: PiecesReader, timeout_seconds: float
    ) -> float:
        """Receive all pieces; return when all would be here if the peer had taken no time."""
        heard_at: float | None = None
        began_at: float | None = None
        while True:
            message = await self._receive(asked.pass_id, timeout_seconds)
            heard_at = self._clock.now() if heard_at is None else heard_at
            if isinstance(message, PassPiece) and message.pass_id == asked.pass_id:
                if message.tensor.dtype is not choose_answer_dtype(asked, message.slot):
                    raise RemoteProtocolError(f"{self._name} answers in {message.tensor.dtype!r}")
                began_at = self._clock.now() if began_at is None else began_at
                reader.take(message)
            elif isinstance(message, Passed) and message.pass_id == asked.pass_id:
                break
            elif not isinstance(message, Queued) or message.session != asked.pass_id:
                raise RemoteProtocolError(f"{self._name} answered a pass with {message!r:.80}")
        if not reader.is_complete or began_at is None:
            raise RemoteProtocolError(f"{self._name} left out a part of its answer")
        return heard_at + self._clock.now() - began_at

    async def _receive(self, pass_id: SessionId, timeout_seconds: float) -> Message:
        return await self._wait(self._listen(pass_id), timeout_seconds)

    async def _listen(self, asked_for: SessionId) -> Message:
        return read_answer(await self._stream.receive(), self._name, asked_for)

    async def _wait(self, receiving: Awaitable[Message], timeout_seconds: float) -> Message:
        async with AnswerTimeout(timeout_seconds, f"{self._name} fell silent"):
            return await receiving


class NotWantedError(Exception):
    """A pass that waited for a peer has to go to another one."""


class PassLinks:
    """Lends streams out. Owned by the client's loop; close it at the end.

    Of a peer that is not used any more nothing is left after a while.
    """

    def __init__(
        self, transport: Transport, clock: Clock, secret: bytes, timeout_seconds: float
    ) -> None:
        self._transport = transport
        self._clock = clock
        self._secret = secret
        self._timeout_seconds = timeout_seconds
        self._idle: dict[PeerId, list[PassLink]] = {}
        self._turns = KeyedSemaphores[PeerId](MAX_IN_FLIGHT)
        self._lent: set[PassLink] = set()
        self._sweep: asyncio.TimerHandle | None = None
        self._background = Background()
        self._is_closed = False

    def __repr__(self) -> str:
        num_idle = sum(map(len, self._idle.values()))
        num_wanted = len(self._turns)
        return f"<PassLinks, {len(self._lent)} in use, {num_idle} idle, {num_wanted} peers wanted>"

    @asynccontextmanager
    async def lend(
        self, peer: Announcement, is_wanted: Callable[[], bool], takes_turn: bool = True
    ) -> AsyncIterator[PassLink]:
        """Give a stream to a peer, when it has a turn there; an error ends the stream.

        A short message takes no turn, and waits for none.

        Raises UnavailableError, RefusedError or RemoteProtocolError, and NotWantedError where the
        peer is not wanted by then.
        """
        async with self._turns.hold(peer.peer_id) if takes_turn else nullcontext():
            if not is_wanted():
                raise NotWantedError
            link = await self._take(peer)
            self._lent.add(link)
            try:
                yield link
            except BaseException:
                self._background.begin_closing(link)
                raise
            finally:
                self._lent.discard(link)
            link.used_at = self._clock.now()
            if self._is_closed:
                self._background.begin_closing(link)
                return
            self._idle.setdefault(peer.peer_id, []).append(link)
            self._sweep_later()

    async def close(self) -> None:
        """Close all connections."""
        self._is_closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        links = [*self._lent, *(link for idle in self._idle.values() for link in idle)]
        self._idle.clear()
        self._background.begin_closing(*links)
        await self._background.finish()

    def _sweep_later(self) -> None:
        """Close, in a while, connections that have not been used for a while."""
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(_KEEP_SECONDS, self._sweep_now)

    def _sweep_now(self) -> None:
        self._sweep = None
        for peer_id, idle in list(self._idle.items()):
            for link in [link for link in idle if not self._is_fresh(link)]:
                idle.remove(link)
                self._background.begin_closing(link)
            if not idle:
                del self._idle[peer_id]
        if self._idle:
            self._sweep_later()

    def _is_fresh(self, link: PassLink) -> bool:
        return self._clock.now() - link.used_at < _KEEP_SECONDS

    async def _take(self, peer: Announcement) -> PassLink:
        idle = self._idle.get(peer.peer_id, [])
        while idle:
            link = idle.pop()
            is_same = link.peer.span == peer.span and link.peer.endpoints == peer.endpoints
            if is_same and self._is_fresh(link):
                return link
            self._background.begin_closing(link)
        token, seconds = make_client_token(self._secret, peer.peer_id), self._timeout_seconds
        stream, _ = await open_greeted(
            self._transport, self._clock, peer, peer.span, seconds, token
        )
        return PassLink(self._clock, peer, stream)


def _encode(asked: Pass, slot: Slot, part: range, piece_NH: Tensor) -> bytes:
    data = encode_as(asked.dtype.name, piece_NH)
    wire = WireTensor(asked.dtype, 1, len(part), piece_NH.shape[1], data)
    return encode_frame(PassPiece(asked.pass_id, slot, part.start, wire))


def _join(pieces: list[WireTensor]) -> Tensor:
    decoded = [decode_as(piece.dtype.name, piece.data, piece.shape)[0] for piece in pieces]
    return torch.cat(decoded).float()
