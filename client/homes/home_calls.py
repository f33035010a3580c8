"""Requests of a client to the peer that trains some blocks of an adapter.

Tensor suffixes: B rows, T tokens, H hidden.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

from torch import Tensor

from ...protocol.errors import (
    ErrorCode,
    RefusedError,
    RemoteProtocolError,
    SilentError,
    UnavailableError,
)
from ...protocol.ids import SessionId, UploadId
from ...protocol.messages.adapters import (
    AdapterFetch,
    AdapterHead,
    AdapterMeasure,
    AdapterUpdate,
    make_updated_id,
)
from ...protocol.messages.passes import GatherOrder
from ...protocol.spans import Span
from ..adapters.adapter_versions import find_homed
from ..adapters.learned_states import LearnedState
from ..passes.microbatches import TextGradients, Texts, make_pass_id
from ..passes.pass_asking import PassAsker, PassTrouble
from ..routing.route import Hop
from .home_segments import Applied, LoggedPass, Segment

_PATIENCE_SECONDS = 60.0
"""Requests wait for passes of other clients; the peer reports that meanwhile."""

_PATIENCE = 2.0
"""An adapter may take so many times what its line is expected to take."""

_OF_THE_QUESTION = (
    ErrorCode.OUT_OF_MEMORY,
    ErrorCode.BAD_VALUES,
    ErrorCode.BAD_FRAME,
    ErrorCode.TOO_LONG,
)
"""Refusals that another home would only repeat."""

Result = TypeVar("Result")


class LostHomeError(Exception):
    """The home of a segment is lost; its blame is noted."""


class HomeCalls:
    """Asks the home of a segment, and notes in the segment what it has answered.

    All of it raises RefusedError for what no other home would do either, else LostHomeError.
    """

    def __init__(self, asker: PassAsker) -> None:
        self._asker = asker
        self._parts = itertools.count(1)

    async def bring(self, segment: Segment, trouble: PassTrouble) -> None:
        """Have the home train what was saved of a segment."""
        if segment.is_empty:
            return
        upload_id = UploadId(SessionId(secrets.token_bytes(16)))
        # Every state that is brought has a name of its own, or what is left of another one, with
        # other gradients, could be taken for it.
        mark = secrets.token_hex(8)
        # On another thread: tens of megabytes are copied and hashed.
        head, data = await asyncio.to_thread(segment.saved.pack, upload_id, mark)
        hop, head = segment.home, replace(head, replaces=segment.name)
        await self._try(segment, trouble, lambda: self._bring(hop, head, data))
        segment.name = head.adapter

    async def run_forward(
        self, segment: Segment, span: Span, texts: Texts, trouble: PassTrouble
    ) -> Tensor:
        """Take texts through blocks."""
        hop, named = segment.make_hop(span), segment.name_rows(texts)
        answer = await self._try(segment, trouble, lambda: self._asker.ask_home(hop, named))
        return answer.hidden_BTH

    async def run_backward(
        self,
        segment: Segment,
        span: Span,
        texts: Texts,
        grads_BTH: Tensor,
        trouble: PassTrouble,
        is_known: Callable[[], bool] = lambda: True,
    ) -> TextGradients:
        """Take gradients back through blocks, whose home gathers those of the adapter."""
        hop, named = segment.make_hop(span), segment.name_rows(texts)
        version, log, part = find_homed(texts.adapters), segment.log[-1], next(self._parts)
        is_gathered = not segment.is_empty and version is not None and version.is_trained
        order = GatherOrder(log.number, part) if is_gathered else None
        gradients = await self._try(
            segment, trouble, lambda: self._asker.ask_home(hop, named, grads_BTH, order)
        )
        if segment.log[-1] is not log or not is_known():
            raise LostHomeError  # whoever has it now knows nothing of these gradients
        if is_gathered:
            segment.note_pass(LoggedPass(span, texts, grads_BTH, part))
        return gradients

    async def measure(self, segment: Segment, trouble: PassTrouble) -> None:
        """Note how large what was gathered is."""
        asked, hop = AdapterMeasure(make_pass_id(), segment.gradients), segment.home
        measured = await self._try(segment, trouble, lambda: self._ask_square_sum(hop, asked))
        segment.square_sum = measured

    async def apply(self, segment: Segment, applied: Applied, trouble: PassTrouble) -> None:
        """Have an update made."""
        hop = segment.home
        asked = AdapterUpdate(make_pass_id(), segment.gradients, applied.settings, applied.factor)
        await self._try(segment, trouble, lambda: self._ask_update(hop, asked))
        segment.note_update(applied, make_updated_id(asked))

    async def fetch(self, segment: Segment, trouble: PassTrouble) -> None:
        """Note what is there now, to go on from."""
        asked, hop = AdapterFetch(make_pass_id(), segment.name), segment.home

        async def read() -> LearnedState:
            head, data = await self._ask_files(hop, asked, segment.saved.most_bytes)
            return await asyncio.to_thread(segment.saved.read, head, data, segment.num_updates)

        segment.note_saved(await self._try(segment, trouble, read))

    async def _try(
        self, segment: Segment, trouble: PassTrouble, ask: Callable[[], Awaitable[Result]]
    ) -> Result:
        """Ask a home, and once more if the answer is lost: what was done is not done again.

        Raises RefusedError for what no other home would do either, else LostHomeError.
        """
        try:
            try:
                return await ask()
            except SilentError:
                raise
            except UnavailableError:
                return await ask()
        except (UnavailableError, RemoteProtocolError, RefusedError) as error:
            if isinstance(error, RefusedError) and error.code in _OF_THE_QUESTION:
                raise
            if segment.hop is not None:
                self._asker.blame_home(segment.hop, error, trouble)
                segment.hop = None
            raise LostHomeError from error

    async def _bring(self, hop: Hop, head: AdapterHead, data: bytes) -> None:
        """Have a peer train an adapter from now on."""
        async with self._asker.lend(hop) as (link, way):
            await self._asker.courier.send(link, head, data, way)

    async def _ask_square_sum(self, hop: Hop, asked: AdapterMeasure) -> float:
        """Return the sum of the squares of what a peer has gathered."""
        async with self._asker.lend(hop) as (link, _):
            return await link.measure(asked, _PATIENCE_SECONDS)

    async def _ask_update(self, hop: Hop, asked: AdapterUpdate) -> None:
        """Have a peer make an update."""
        async with self._asker.lend(hop) as (link, _):
            await link.update(asked, _PATIENCE_SECONDS)

    async def _ask_files(
        self, hop: Hop, asked: AdapterFetch, most_bytes: int
    ) -> tuple[AdapterHead, bytes]:
        """Return what a peer has made of an adapter, which is no more than so many bytes."""
        async with self._asker.lend(hop) as (link, way):
            with self._asker.line.carry(most_bytes) as carrying_seconds:
                carrying_seconds = min(
                    carrying_seconds, way.expect_seconds(self._asker.line.num_bytes)
                )
                patience_seconds = _PATIENCE_SECONDS + _PATIENCE * carrying_seconds
                return await link.fetch_adapter(
                    asked, most_bytes, carrying_seconds, patience_seconds
                )
