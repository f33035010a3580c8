"""Asks for one pass through one hop, peer after peer until one answers."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from ...protocol.errors import (
    DirectoryError,
    ErrorCode,
    RefusedError,
    RemoteProtocolError,
    RouteError,
    UnavailableError,
)
from ...protocol.ids import PeerId
from ...protocol.messages.passes import (
    GatherOrder,
    Pass,
    PassKind,
    Slot,
    list_answer_slots,
    list_question_slots,
)
from ...protocol.net.clock import Clock
from ...protocol.net.transport import Transport
from ...protocol.records.announcements import Announcement, PeerState
from ...protocol.spans import Span
from ...protocol.tensors import WireDtype, compute_num_bytes
from ...protocol.versions import OPTIMIZER_VERSION, PASS_VERSION
from ..adapters.adapter_versions import (
    AdapterVersion,
    PublishedAdapter,
    SentAdapter,
    count_gradients,
    cut_apart,
    list_adapter_rows,
    list_adapters,
)
from ..routing.peer_book import Bandwidth, PeerBook
from ..routing.route import Fault, Hop, PeerFailure
from ..settings.config import ClientConfig
from .adapter_courier import AdapterCourier
from .microbatches import TextGradients, Texts, choose_scale
from .pass_failovers import PassFailovers
from .pass_link import PassAnswer, PassLink, make_pass_id
from .pass_links import NotWantedError, PassLinks
from .pass_trouble import PassTrouble, make_route_error

_logger = logging.getLogger(__name__)

_DIRECTORY_SECONDS = 5.0
"""How long the directory may take before the last view has to do."""

_PUBLICATION_SECONDS = 2.0
"""When a peer that lacks a published adapter is asked again: its publisher may just bring it."""

_PATIENCE = 20.0
_LEAST_PATIENCE_SECONDS = 60.0
"""A peer that goes on saying that it is at a pass is left after so many times what it should take:
others may be waiting there as well, or it lies."""


_NOISE = 0.1
"""By what fraction one of two hosts that seem alike may be taken for slower."""


@dataclass(frozen=True)
class Passage:
    """The output of some blocks: their span, and the weight format that computed it."""

    span: Span
    weights: str
    hidden_BTH: Tensor


class PassAsker:
    """Chooses peers for passes and asks them. Owned by the client's loop."""

    def __init__(
        self,
        book: PeerBook,
        transport: Transport,
        clock: Clock,
        config: ClientConfig,
        secret: bytes,
    ) -> None:
        self._book = book
        self._clock = clock
        self._config = config
        self._rng = random.Random(config.seed)
        self._links = PassLinks(transport, clock, secret, config.connect_timeout_seconds)
        self.courier = AdapterCourier(clock, book.bandwidth)
        self.failovers = PassFailovers()
        self._forgiven: set[PeerId] = set()
        self._refreshing = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<PassAsker, {self._links!r}>"

    @property
    def line(self) -> Bandwidth:
        """The line of this client to all peers."""
        return self._book.bandwidth

    def guess_num_hops(self, span: Span) -> int:
        """Return how many hops a way through a span has at least."""
        longest = max((len(peer.span) for peer in self._book.view.online), default=len(span))
        return -(-len(span) // longest)

    def has_host(self, block: int) -> bool:
        """Return whether somebody takes passes through a block, as far as was heard last."""
        hosts = self._book.view.serving(block)
        return any(_takes_passes(peer, self._config.weights) for peer in hosts)

    async def ask_forward(self, span: Span, texts: Texts, weights: str | None = None) -> Passage:
        """Take texts through the first blocks of a span, as `weights` or as those of anybody.

        Raises RouteError with the blocks that nobody serves in time, RefusedError when every peer
        declines the texts, or one has too little memory for them; else what the last one did.
        """
        trouble = self.make_trouble(span)
        while True:
            hosts = await self._wait_for_hosts(span, trouble, weights)
            hop = self._choose(hosts, span, texts.num_tokens, PassKind.FORWARD)
            part = texts.take_blocks(slice(0, len(hop.span)))
            answer = await self._try(hop, part, None, trouble)
            if answer is not None:
                hidden_BTH = answer.tensors[Slot.HIDDEN].view(texts.hidden_BTH.shape)
                return Passage(hop.span, hop.peer.weights, hidden_BTH)

    async def ask_backward(
        self, span: Span, texts: Texts, grads_BTH: Tensor, weights: str
    ) -> TextGradients | None:
        """Return gradients of what went into a span, through the weights of the way there.

        None when no peer hosts all of it as such weights any more. Raises what `ask_forward` does.
        """
        trouble = self.make_trouble(span)
        scale = choose_scale(grads_BTH) if self._config.wire_dtype == "fp16" else 1.0
        while True:
            hosts = await self._wait_for_hosts(span, trouble, weights)
            hosts = [peer for peer in hosts if peer.span.covers(span)]
            if not hosts:
                self.failovers.note(trouble.take_lost(span), ())
                return None
            hop = self._choose(hosts, span, texts.num_tokens, PassKind.BACKWARD)
            answer = await self._try(hop, texts, scale * grads_BTH, trouble)
            if answer is not None:
                return TextGradients.read(answer.tensors, texts, span).multiply(1 / scale)

    async def choose_home(self, span: Span, trouble: PassTrouble, weights: str | None) -> Hop:
        """Return who is to train the first blocks of a span; raises what `ask_forward` does."""
        trouble.least_version = OPTIMIZER_VERSION
        hosts = await self._wait_for_hosts(span, trouble, weights)
        return self._choose(hosts, span, 1, PassKind.BACKWARD)

    async def ask_home(
        self,
        hop: Hop,
        texts: Texts,
        grads_BTH: Tensor | None = None,
        order: GatherOrder | None = None,
    ) -> TextGradients:
        """Ask one peer, once: for hidden states, or, given gradients, for those before them.

        Raises UnavailableError, RefusedError or RemoteProtocolError.
        """
        scale = 1.0
        if grads_BTH is not None and self._config.wire_dtype == "fp16":
            scale = choose_scale(grads_BTH)
            grads_BTH = scale * grads_BTH
        if order is not None:
            order = replace(order, scale=1 / scale)
        answer = await self._ask(hop, texts, grads_BTH, lambda: True, order)
        self.failovers.note_answer(hop)
        return TextGradients.read(answer.tensors, texts, hop.span).multiply(1 / scale)

    @asynccontextmanager
    async def lend(
        self, hop: Hop, takes_place: bool = True
    ) -> AsyncIterator[tuple[PassLink, Bandwidth]]:
        """Lend a stream to one peer, with its line as far as it has shown."""
        async with self._links.lend(hop.peer, lambda: True, takes_place) as link:
            self.failovers.note_reached(hop.peer.peer_id)
            yield link, self._book.pass_times(hop.peer.peer_id).line

    def blame_home(self, hop: Hop, error: PeerFailure, trouble: PassTrouble) -> None:
        """Note what became of a peer that was asked alone."""
        trouble.note(error)
        if not isinstance(error, RefusedError) or not self._may_ask_others(error, hop, trouble):
            lost = self._book.blame(hop, error, self._forgiven)
            lost.__cause__ = error
            trouble.note_lost(lost)

    async def bring_adapter(self, hop: Hop, adapter: SentAdapter) -> None:
        """See that a peer has an adapter for a session that is about to be opened there.

        Raises UnavailableError, RefusedError or RemoteProtocolError.
        """
        await cut_apart([adapter], hop.span)
        if adapter.cut(hop.span) is not None and isinstance(adapter, AdapterVersion):
            async with self.lend(hop) as (link, way):
                await self.courier.bring(link, [adapter], hop.span, way, is_trained=False)

    async def list_peers(self) -> list[Announcement]:
        """Return who serves blocks now and understands adapters, least in doubt first; no liars."""
        await self._refresh(0.0)
        return [peer for peer in self._book.list_by_doubt() if peer.max_version >= PASS_VERSION]

    def find_peer(self, peer_id: PeerId) -> Announcement | None:
        """Return what a peer announced, as far as was heard last; None once it has left."""
        peer = self._book.view.find(peer_id)
        return None if peer is None or peer.state is PeerState.OFFLINE else peer

    def make_route_error(self, span: Span) -> RouteError:
        """Return what to say where nobody serves blocks for fine-tuning."""
        return make_route_error(span, self._book.view, None)

    def forget_adapters(self, hop: Hop) -> None:
        """Note that a peer does not have what it was brought."""
        self.courier.forget(hop.peer.peer_id)

    async def close(self) -> None:
        """Hang up on everybody."""
        await self._links.close()

    async def _try(
        self, hop: Hop, texts: Texts, grads_BTH: Tensor | None, trouble: PassTrouble
    ) -> PassAnswer | None:
        """Ask one peer; None when it failed, for which it is blamed."""
        try:
            # Others may have found out meanwhile that the peer is dead.
            is_wanted = partial(self._is_wanted, hop, trouble)
            answer = await self._ask(hop, texts, grads_BTH, is_wanted)
        except NotWantedError:
            return None
        except (UnavailableError, RemoteProtocolError, RefusedError) as error:
            adapters = list_adapters(texts.adapters)
            if isinstance(error, RefusedError) and self._may_ask_others(
                error, hop, trouble, adapters
            ):
                trouble.note(error)
                return None
            lost = self._book.blame(hop, error, self._forgiven)
            lost.__cause__ = error
            trouble.note_lost(lost)
            trouble.note(error)
            return None
        for liar in trouble.refusals.contradicted:
            self._book.quarantine(liar.peer, Fault.BROKEN)
        self.failovers.note(trouble.take_lost(hop.span), (hop,))
        self._book.note_pass(hop.peer.peer_id)
        self.failovers.note_answer(hop)
        return answer

    def _may_ask_others(
        self,
        error: RefusedError,
        hop: Hop,
        trouble: PassTrouble,
        adapters: Sequence[SentAdapter] = (),
    ) -> bool:
        """Note a refusal that is neither the peer's fault nor that of the texts."""
        peer_id = hop.peer.peer_id
        if error.code is ErrorCode.UNKNOWN_ADAPTER:
            self.courier.forget(peer_id)
            if all(isinstance(one, AdapterVersion) for one in adapters):
                # It has expired, or the peer was restarted: it gets it again, but only once.
                is_sound = peer_id not in trouble.brought_again
                trouble.brought_again.add(peer_id)
                return is_sound
            if all(isinstance(one, PublishedAdapter) and not one.is_trained for one in adapters):
                # The peer may have just come, and get it from whoever published it.
                trouble.note_full(peer_id, _PUBLICATION_SECONDS)
                return True
        elif error.code is ErrorCode.NO_ROOM_FOR_ADAPTER and error.retry_after_seconds is not None:
            trouble.note_full(peer_id, error.retry_after_seconds)
            return True
        elif error.code not in (ErrorCode.OUT_OF_MEMORY, ErrorCode.NO_ROOM_FOR_ADAPTER):
            return False
        trouble.too_small.add(peer_id)
        return True

    def make_trouble(self, span: Span) -> PassTrouble:
        """Return what to note failures in, of passes through a span."""
        return PassTrouble(span, self._clock, self._config.failover_timeout_seconds)

    async def _ask(
        self,
        hop: Hop,
        texts: Texts,
        grads_BTH: Tensor | None,
        is_wanted: Callable[[], bool],
        gather: GatherOrder | None = None,
    ) -> PassAnswer:
        await cut_apart(list_adapters(texts.adapters), hop.span)
        asked = replace(self._make_pass(hop, texts, grads_BTH is not None), gather=gather)
        tensors = texts.list_tensors(grads_BTH)
        slots = (*list_question_slots(asked).values(), *list_answer_slots(asked).values())
        width = texts.hidden_BTH.shape[-1]
        num_bytes = compute_num_bytes(asked.dtype, 1, sum(slots), width)
        bandwidth, num_tokens = self._book.bandwidth, texts.num_tokens
        times = self._book.pass_times(hop.peer.peer_id)
        way = times.line
        expected_seconds = times.expect_seconds(hop, num_tokens, asked.kind)
        patience_seconds = _LEAST_PATIENCE_SECONDS + _PATIENCE * expected_seconds
        with times.count(expected_seconds):
            async with self._links.lend(hop.peer, is_wanted) as link:
                self.failovers.note_reached(hop.peer.peer_id)
                adapters = list_adapters(texts.adapters)
                await self.courier.bring(link, adapters, hop.span, way, texts.trains_adapters)
                asked_at = self._clock.now()
                with bandwidth.carry(num_bytes) as carrying_seconds:
                    carrying_seconds = min(
                        carrying_seconds, way.expect_seconds(bandwidth.num_bytes)
                    )
                    answer = await link.ask(
                        asked, tensors, carrying_seconds, patience_seconds + carrying_seconds
                    )
        # What the peer could lie about counts for its own line only.
        bandwidth.note_answer(num_bytes, self._clock.now() - asked_at)
        way.note_answer(num_bytes, answer.way_seconds)
        times.note(hop, num_tokens, asked.kind, asked_at, self._clock.now(), answer.way_seconds)
        return answer

    def _choose(
        self, hosts: Sequence[Announcement], span: Span, num_tokens: int, kind: PassKind
    ) -> Hop:
        """Return which of the hosts of the span's first block takes it, as far as it can.

        Interleaved weighted round robin, after SWARM (Ryabinin et al., 2023, section 3.1): the
        host where the microbatch is done first, by what it has under way and what it took before.
        Rated by block: a host of many blocks may take longer.
        """

        def rate(hop: Hop) -> float:
            times = self._book.pass_times(hop.peer.peer_id)
            seconds = times.busy_seconds + times.expect_seconds(hop, num_tokens, kind)
            return seconds / len(hop.span) * self._rng.uniform(1, 1 + _NOISE)

        hops = (Hop(peer, Span(span.start, min(span.stop, peer.span.stop))) for peer in hosts)
        return min(hops, key=rate)

    def _is_wanted(self, hop: Hop, trouble: PassTrouble) -> bool:
        hosts = self._find_hosts(hop.span.start, trouble, hop.peer.weights)
        return any(peer.peer_id == hop.peer.peer_id for peer in hosts)

    def _make_pass(self, hop: Hop, texts: Texts, is_backward: bool) -> Pass:
        num_rows, num_tokens, hidden_size = texts.hidden_BTH.shape
        prompts = texts.prompts_LBPH
        prompt_rows, prompt_tokens = (0, 0) if prompts is None else prompts.shape[1:3]
        adapters = list_adapter_rows(texts.adapters, hop.span)
        return Pass(
            make_pass_id(),
            PassKind.BACKWARD if is_backward else PassKind.FORWARD,
            hop.peer.model_id,
            hop.span,
            num_rows,
            num_tokens,
            self._choose_dtype(hop.peer),
            prompt_rows,
            prompt_tokens,
            adapters,
            count_gradients(texts.adapters, hop.span, hidden_size) if is_backward else 0,
            trains_adapters=texts.trains_adapters and bool(adapters) and not is_backward,
        )

    def _choose_dtype(self, peer: Announcement) -> WireDtype:
        if self._config.wire_dtype != "auto":
            return WireDtype[self._config.wire_dtype.upper()]
        return WireDtype.FP32 if peer.weights == "fp32" else WireDtype.BF16

    async def _wait_for_hosts(
        self, span: Span, trouble: PassTrouble, weights: str | None
    ) -> list[Announcement]:
        """Return the least doubtful peers that take passes through the first block of a span."""
        weights = weights or self._config.weights
        while True:
            await trouble.pause()
            await self._refresh(self._config.refresh_seconds)
            hosts = self._find_hosts(span.start, trouble, weights)
            if hosts:
                return hosts
            if trouble.full:
                await trouble.wait_for_room()
                continue
            trouble.raise_refusal()
            await self._refresh(0.0)
            hosts = self._find_hosts(span.start, trouble, weights)
            if hosts:
                return hosts
            trouble.note(make_route_error(span, self._book.view, weights))

    async def _refresh(self, max_age_seconds: float) -> None:
        """Read the directory, one for all that ask; where that fails, the last view has to do."""
        async with self._refreshing:
            try:
                async with asyncio.timeout(_DIRECTORY_SECONDS):
                    await self._book.refresh(max_age_seconds)
            except (DirectoryError, TimeoutError) as error:
                _logger.debug(
                    "the directory cannot be read, the client uses its last view: %r", error
                )

    def _find_hosts(
        self, block: int, trouble: PassTrouble, weights: str | None
    ) -> list[Announcement]:
        others = {
            peer.peer_id
            for peer in self._book.view.serving(block)
            if not _takes_passes(peer, weights) or peer.max_version < trouble.least_version
        }
        return self._book.find_hosts(
            block, {*others, *trouble.refusals.peer_ids, *trouble.too_small, *trouble.full}
        )


def _takes_passes(peer: Announcement, weights: str | None) -> bool:
    is_able = peer.max_version >= PASS_VERSION and peer.takes_passes
    return is_able and weights in (None, peer.weights)
