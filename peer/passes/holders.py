"""Asks other peers for the leaves of published adapters that they hold."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from secrets import token_bytes
from typing import TypeVar

from ...protocol.errors import DirectoryError, RefusedError, RemoteProtocolError, UnavailableError
from ...protocol.ids import AdapterId, ModelId, PassId, PeerId, SessionId
from ...protocol.messages.adapters import (
    AdapterHead,
    AdapterKept,
    AdapterPiece,
    AdapterReader,
    Manifest,
    PublicationFetch,
    UploadPace,
)
from ...protocol.messages.codec import check_kind, encode_frame, read_answer
from ...protocol.messages.fields import Message
from ...protocol.net.clock import AnswerTimeout, Clock
from ...protocol.net.dialling import open_greeted
from ...protocol.net.network import Presence
from ...protocol.net.retry import Backoff, Backoffs
from ...protocol.net.transport import Stream, admit_pieces
from ...protocol.records.announcements import MAX_ADAPTERS, Announcement, shorten_adapter
from ...protocol.records.swarm_view import SwarmView
from ...protocol.spans import Span
from ...protocol.versions import PUBLISH_VERSION

_logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer", bound=Message)

_DIAL_SECONDS = 10.0
_SILENCE_SECONDS = 20.0
"""How long a holder may take for its first word: what it sends to others is under way as well."""

_MOST_ASKED = 8
"""Peers that are asked for one adapter. Anybody can announce that they hold one."""

_FAILING = Backoff(30.0, 3600.0)
"""How long a peer is not asked again that did not answer, or sent something else."""


@dataclass(frozen=True)
class Leaves:
    """Leaves of some blocks that a holder has sent, each what its digest says."""

    manifest: Manifest
    files: Mapping[int, bytearray]
    keep_seconds: float
    """How long the adapter stays published unless that is renewed."""


class Holders:
    """The peers that announce that they hold published adapters.

    Made once for each span that is served: a move forgets which of them are in quarantine.
    """

    def __init__(self, presence: Presence, model_id: ModelId, clock: Clock) -> None:
        self._transport = presence.transport
        self._directory = presence.directory
        self._own_id = presence.identity.peer_id
        self._model_id = model_id
        self._clock = clock
        self._failing = Backoffs[PeerId](_FAILING, clock)

    async def list_holders(
        self, name: AdapterId, span: Span, known: Collection[PeerId] = ()
    ) -> list[Announcement]:
        """Return peers that may hold an adapter, or have held it: best for a span first."""
        try:
            announcements = await self._directory.lookup(self._model_id)
        except DirectoryError as error:
            _logger.debug("cannot look up the holders of an adapter: %s", error)
            return []
        self._failing.forget_expired()
        view = SwarmView.from_announcements(self._model_id, announcements, self._clock.wall())
        short = shorten_adapter(name)

        def may_hold(peer: Announcement) -> bool:
            # One that announces as many as it may can hold more.
            is_announced = short in peer.adapters or len(peer.adapters) == MAX_ADAPTERS
            return is_announced or peer.peer_id in known

        def rank(peer: Announcement) -> tuple[bool, bool, int]:
            overlap = peer.span.overlap(span)
            num_blocks = 0 if overlap is None else len(overlap)
            return short not in peer.adapters, not peer.endpoints, -num_blocks

        peers = [
            peer
            for peer in view.online
            if may_hold(peer) and peer.peer_id != self._own_id
            if peer.max_version >= PUBLISH_VERSION and self._failing.may_try(peer.peer_id)
        ]
        return sorted(peers, key=rank)[:_MOST_ASKED]

    async def fetch(
        self, peer: Announcement, name: AdapterId, span: Span, charge: Callable[[Manifest], None]
    ) -> Leaves:
        """Return what a peer holds of an adapter for some blocks.

        `charge` hears of the manifest before any leaf comes, and may raise RefusedError. Raises
        UnavailableError or RemoteProtocolError for what the peer does, which is left alone then.
        """
        async with self._ask(peer, _make_question(name, span)) as (stream, asked):
            head = await self._hear(stream, asked, AdapterHead, _SILENCE_SECONDS)
            if head.adapter != name or head.manifest is None:
                raise RemoteProtocolError(f"a holder answered with {head!r:.80}")
            manifest = head.manifest
            if head.num_bytes != manifest.count_bytes(span):
                raise RemoteProtocolError("a holder has leaves of another size than its manifest")
            charge(manifest)
            reader, pace = AdapterReader(head), UploadPace(self._clock.now())
            while not reader.is_complete:
                seconds = pace.deadline - self._clock.now()
                piece = await self._hear(stream, asked, AdapterPiece, seconds)
                reader.take(piece)
                pace.note_piece(len(piece.data), self._clock.now())
            kept = await self._hear(stream, asked, AdapterKept, _SILENCE_SECONDS)
            files = await asyncio.to_thread(lambda: manifest.split(span, reader.join()))
            return Leaves(manifest, files, kept.keep_seconds)

    async def fetch_keep_seconds(
        self, name: AdapterId, span: Span, known: Collection[PeerId]
    ) -> float | None:
        """Return for how long an adapter stays published, as a holder says.

        0.0 if those that can be asked do not have it any more; None if nobody can be asked.
        """
        seconds: float | None = None
        for peer in await self.list_holders(name, span, known):
            try:
                async with self._ask(peer, _make_question(name)) as (stream, asked):
                    kept = await self._hear(stream, asked, AdapterKept, _SILENCE_SECONDS)
                    return kept.keep_seconds
            except _NotHeldError:
                seconds = 0.0
            except (UnavailableError, RemoteProtocolError) as error:
                _logger.debug("cannot confirm that an adapter is published: %s", error)
        return seconds

    @asynccontextmanager
    async def _ask(
        self, peer: Announcement, asked: PublicationFetch
    ) -> AsyncGenerator[tuple[Stream, PublicationFetch]]:
        """Ask a peer; what it does wrong inside of the `with` is held against it."""
        try:
            stream = await self._open(peer)
            try:
                stream.set_gate(admit_pieces)
                await stream.send(encode_frame(asked))
                yield stream, asked
            finally:
                await stream.close()
        except _NotHeldError:
            raise
        except (UnavailableError, RemoteProtocolError):
            self._failing.note_failure(peer.peer_id)
            raise
        self._failing.note_success(peer.peer_id)

    async def _open(self, peer: Announcement) -> Stream:
        try:
            stream, _ = await open_greeted(
                self._transport, self._clock, peer, peer.span, _DIAL_SECONDS
            )
        except RefusedError as error:
            raise UnavailableError(str(error)) from error
        return stream

    async def _hear(
        self, stream: Stream, asked: PublicationFetch, kind: type[_Answer], seconds: float
    ) -> _Answer:
        try:
            async with AnswerTimeout(max(0.0, seconds), "a holder fell silent"):
                answer = read_answer(await stream.receive(), "a holder", asked.pass_id)
        except RefusedError as error:
            raise _NotHeldError(str(error)) from error
        return check_kind(answer, kind, "a holder")


class _NotHeldError(UnavailableError):
    """A peer does not have what it was asked for, which it is not blamed for."""


def _make_question(name: AdapterId, span: Span | None = None) -> PublicationFetch:
    pass_id = PassId(SessionId(token_bytes(16)))
    if span is None:
        return PublicationFetch(pass_id, name)
    return PublicationFetch(pass_id, name, span.start, len(span))
