"""Scripted peers that take passes on virtual time, as slowly as they are told to."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from session_scene import MODEL_ID, NUM_BLOCKS, SECRET, WIDTH, SessionScene, now
from torch import Tensor

from shoal.client.adapters.adapter_versions import AdapterVersion
from shoal.client.passes.microbatches import Texts
from shoal.client.passes.pass_asking import PassAsker
from shoal.kernels.wire_tensors import encode_as
from shoal.protocol.errors import ErrorCode
from shoal.protocol.identity import Identity
from shoal.protocol.ids import AdapterId, SessionId, UploadId
from shoal.protocol.messages.adapters import (
    AdapterHead,
    AdapterKept,
    AdapterPiece,
    AdapterWithdrawal,
    LoraConfig,
    PublicationFetch,
    UploadPace,
)
from shoal.protocol.messages.codec import decode_frame, encode_frame
from shoal.protocol.messages.passes import (
    Pass,
    Passed,
    PassPiece,
    PiecesReader,
    cut_vectors,
    list_answer_slots,
    list_question_slots,
)
from shoal.protocol.messages.session import Declined, Hello, Queued, Welcome
from shoal.protocol.net.transport import Stream
from shoal.protocol.spans import Span
from shoal.protocol.tensors import WireTensor
from shoal.protocol.versions import MAX_VERSION

WHOLE = Span(0, NUM_BLOCKS)


@dataclass
class PassPeer:
    """Answers every pass with zeros. Of `seconds` for one pass it says what it likes.

    It has room for adapters from some time on, and may forget those that it said it keeps.
    """

    identity: Identity
    seconds: float
    says_queue_seconds: float | None = None
    span: Span = WHOLE
    asked: list[Pass] = field(default_factory=list)
    is_free: asyncio.Lock = field(default_factory=asyncio.Lock)
    has_room_at: float = 0.0
    forgets_adapters: bool = False
    fetching_seconds: float | None = None
    """When it says to ask again for an adapter that it has forgotten."""
    piece_seconds: float = 0.0
    line: asyncio.Lock = field(default_factory=asyncio.Lock)
    """On which pieces come one after the other: peers may share that of a client."""
    head_seconds: float = 0.0
    is_patient: bool = False
    """Whether it waits for ever for the rest of an adapter."""
    brought: list[AdapterHead] = field(default_factory=list)
    refuses_heads: bool = False
    num_pieces: int = 0
    is_mute: bool = False
    """Whether it takes everything about adapters and says nothing."""
    is_mute_to_heads: bool = False
    """Whether it holds what it is sent, and never says so again."""
    renewed: list[AdapterId] = field(default_factory=list[AdapterId])
    published: dict[AdapterId, float] = field(default_factory=dict[AdapterId, float])
    """What is kept for everybody, and when that was said last."""
    former: dict[AdapterId, float] = field(default_factory=dict[AdapterId, float])
    """What the client published from a former address, and when: only from there it is renewed."""
    withdrawn: list[AdapterId] = field(default_factory=list)

    async def serve(self, stream: Stream) -> None:
        reader: PiecesReader | None = None
        head: AdapterHead | None = None
        pace = UploadPace(now())
        while (frame := await stream.receive()) is not None:
            message = decode_frame(frame)
            if isinstance(message, Hello):
                peer_id = self.identity.peer_id
                welcome = Welcome(MAX_VERSION, "fake", peer_id, MODEL_ID, self.span, 0.0)
                await stream.send(encode_frame(welcome))
            elif isinstance(message, Pass):
                self.asked.append(message)
                reader = PiecesReader(list_question_slots(message), WIDTH)
            elif isinstance(message, PassPiece) and reader is not None:
                reader.take(message)
                if reader.is_complete:
                    await self._answer(stream, self.asked[-1])
            elif isinstance(message, AdapterHead):
                head, pace = message, UploadPace(now())
                self.brought.append(message)
                await asyncio.sleep(self.head_seconds)
                if message.adapter in self.published:
                    if not self.is_mute and not self.is_mute_to_heads:
                        await self._keep(stream, message)
                elif self.refuses_heads:
                    code = ErrorCode.NO_ROOM_FOR_ADAPTER
                    await self._decline(stream, message.upload_id, code)
            elif isinstance(message, PublicationFetch):
                self.renewed.append(message.adapter)
                if self.is_mute or self.is_mute_to_heads:
                    continue
                if message.adapter in self.published:
                    self.published[message.adapter] = now()
                    kept = AdapterKept(UploadId(message.pass_id), 300.0)
                    await stream.send(encode_frame(kept))
                elif message.adapter in self.former:
                    seconds = 300.0 - (now() - self.former[message.adapter])
                    kept = AdapterKept(UploadId(message.pass_id), seconds)
                    await stream.send(encode_frame(kept))
                else:
                    await self._decline(stream, message.pass_id, ErrorCode.UNKNOWN_ADAPTER)
            elif isinstance(message, AdapterWithdrawal):
                if self.is_mute:
                    continue
                self.withdrawn.append(message.adapter)
                self.published.pop(message.adapter, None)
                await stream.send(encode_frame(AdapterKept(UploadId(message.pass_id), 0.0)))
            elif isinstance(message, AdapterPiece):
                assert head is not None
                assert head.upload_id == message.upload_id
                self.num_pieces += 1
                await self._take_piece(stream, head, message)
                if now() > pace.deadline and not self.is_patient:
                    return
                pace.note_piece(len(message.data), now())

    async def _take_piece(self, stream: Stream, head: AdapterHead, piece: AdapterPiece) -> None:
        async with self.line:
            await asyncio.sleep(self.piece_seconds)
        if self.refuses_heads or self.is_mute:
            return
        if head.adapter in self.published and not self.is_mute_to_heads:
            return
        if piece.offset + len(piece.data) < head.num_bytes:
            return
        if now() < self.has_room_at:
            code = ErrorCode.NO_ROOM_FOR_ADAPTER
            await self._decline(stream, head.upload_id, code, retry_after_seconds=5.0)
        else:
            await self._keep(stream, head)

    async def _keep(self, stream: Stream, head: AdapterHead) -> None:
        if head.is_published:
            self.published[head.adapter] = now()
        await stream.send(encode_frame(AdapterKept(head.upload_id, 300.0)))

    async def _decline(
        self,
        stream: Stream,
        what: SessionId,
        code: ErrorCode,
        retry_after_seconds: float | None = None,
    ) -> None:
        declined = Declined(what, 0, code, "as the test says", retry_after_seconds)
        await stream.send(encode_frame(declined))

    async def _answer(self, stream: Stream, asked: Pass) -> None:
        if asked.adapters and self.forgets_adapters:
            code = ErrorCode.UNKNOWN_ADAPTER
            await self._decline(stream, asked.pass_id, code, self.fetching_seconds)
            return
        started_at = now()
        await stream.send(encode_frame(Queued(asked.pass_id, 0, 0.0)))
        async with self.is_free:
            queue_seconds = now() - started_at
            await self._compute(stream, asked)
        passed = Passed(asked.pass_id, queue_seconds, self.seconds)
        if self.says_queue_seconds is not None:
            passed = Passed(asked.pass_id, self.says_queue_seconds, 0.0)
        for slot, num_vectors in list_answer_slots(asked).items():
            for part in cut_vectors(num_vectors, asked.dtype, WIDTH):
                data = encode_as(asked.dtype.name, torch.zeros(len(part), WIDTH))
                wire = WireTensor(asked.dtype, 1, len(part), WIDTH, data)
                await stream.send(encode_frame(PassPiece(asked.pass_id, slot, part.start, wire)))
        await stream.send(encode_frame(passed))

    async def _compute(self, stream: Stream, asked: Pass) -> None:
        rest_seconds = self.seconds
        while rest_seconds > 0:
            await asyncio.sleep(min(1.0, rest_seconds))
            rest_seconds -= 1.0
            await stream.send(encode_frame(Queued(asked.pass_id, 0, 0.0)))


async def add_pass_peer(
    scene: SessionScene,
    seconds: float,
    says_queue_seconds: float | None = None,
    span: Span = WHOLE,
    **announced: Any,
) -> PassPeer:
    """Announce a peer, of all blocks unless there is a span."""
    number = scene.num_transports
    peer = PassPeer(Identity(bytes([100 + number]) * 32), seconds, says_queue_seconds, span)
    endpoint = await scene.listen(f"pass{number}", peer.serve)
    facts = {"endpoints": (endpoint,), "max_version": MAX_VERSION}
    await scene.announce_peer(peer, **(facts | announced))
    return peer


async def move_pass_peer(scene: SessionScene, peer: PassPeer, old_name: str) -> None:
    """Let a peer go on at another address, and announce that."""
    scene.network.kill(old_name)
    endpoint = await scene.listen(f"{old_name}-elsewhere", peer.serve)
    await scene.announce_peer(peer, endpoints=(endpoint,), max_version=MAX_VERSION)


def make_asker(scene: SessionScene) -> PassAsker:
    """Return what asks them. Close it."""
    return PassAsker(scene.swarm.book, scene.client, scene.config, SECRET)


def make_texts(num_tokens: int = 64) -> tuple[Texts, Tensor]:
    """Return some texts, and gradients of as many."""
    hidden_BTH = torch.ones(1, num_tokens, WIDTH)
    return Texts(hidden_BTH), hidden_BTH


def make_adapted_texts(num_numbers: int = 8) -> Texts:
    """Return some texts with an adapter of their own."""
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    matrices = {name: torch.ones(2, num_numbers // 2)}
    adapter = AdapterVersion(LoraConfig(2, 4), matrices, False, "one", 0)
    return replace(make_texts()[0], adapters=(adapter,))
