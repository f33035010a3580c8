"""Asks for one pass through one hop, peer after peer until one answers.

Failures are noted, and observers are told which peers took over.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from ...protocol.errors import (
    DirectoryError,
    ErrorCode,
    RefusedError,
    RemoteProtocolError,
    RouteError,
    ShoalError,
    SilentError,
    UnavailableError,
)
from ...protocol.ids import NO_ADAPTER, AdapterId, PeerId
from ...protocol.messages.adapters import AdapterHead
from ...protocol.messages.passes import AccumulationOrder, PassKind
from ...protocol.net.retry import Backoff, Retry
from ...protocol.net.transport import Transport
from ...protocol.records.announcements import Announcement, PeerState
from ...protocol.spans import Span
from ..adapters.adapter_versions import (
    AdapterVersion,
    PublishedAdapter,
    SentAdapter,
    cut_adapters,
    list_adapters,
)
from ..routing.peer_book import Bandwidth, PeerBook, takes_passes
from ..routing.route import Failover, Failures, Fault, Hop, LostHopError, PeerFailure
from ..settings.client_config import ClientConfig
from .adapter_uploads import AdapterUploads
from .microbatches import TextGradients, Texts, choose_scale
from .pass_links import NotWantedError, PassLink, PassLinks

_logger = logging.getLogger(__name__)

_DIRECTORY_SECONDS = 5.0
"""How long the directory may take before the last view has to do."""

_PATIENCE = 20.0
_LEAST_PATIENCE_SECONDS = 60.0
"""A peer that goes on saying that it is at a pass is left after so many times what it should take:
others may be waiting there as well, or it lies."""


_LEAST_UPLOAD_SECONDS = 20.0
_UPLOAD_PATIENCE = 2.0
"""All of an adapter may take so many times what the line is expected to take: others wait for the
peer meanwhile, and one that reads now and then a piece could keep them waiting for an hour."""

_AGAIN = Backoff(0.1, 1.6)
"""Between attempts at one pass."""

_MOST_UNSEEN = 256
"""Nobody may be watching."""

_MOST_KNOWN = 4096
"""Bounds memory if many peer ids come and go; a forgotten peer may be reported twice, or never."""

_NOISE = 0.1
"""By what fraction one of two hosts that seem alike may be taken for slower."""


@dataclass(frozen=True)
class SpanOutput:
    """The output of some blocks: their span, and the weight format that computed it."""

    span: Span
    weights: str
    hidden_BTH: Tensor


class PassFailovers:
    """The events since the last look: peers that answered, and peers that were lost.

    Batches are many passes: a peer is told of once when it is lost, and again only if it has
    answered one since. A peer that could never be reached took no part and is not reported.
    """

    def __init__(self) -> None:
        self._unseen: dict[PeerId, Failover] = {}
        self._recent_hops: dict[PeerId, Hop] = {}
        self._is_lost: dict[PeerId, bool] = {}
        """Of each peer that took part, the newest at the end."""

    def note_reached(self, peer_id: PeerId) -> None:
        """Note that a peer takes part: a stream leads there."""
        self._is_lost[peer_id] = self._is_lost.pop(peer_id, False)
        if len(self._is_lost) > _MOST_KNOWN:
            del self._is_lost[next(iter(self._is_lost))]

    def note_answer(self, hop: Hop) -> None:
        """Note that a peer has done its part of a pass."""
        self._is_lost[hop.peer.peer_id] = False
        self._recent_hops[hop.peer.peer_id] = hop

    def note(self, lost: Iterable[LostHopError], replacements: Sequence[Hop]) -> None:
        """Note that others have done what some peers did not."""
        for error in lost:
            peer_id = error.hop.peer.peer_id
            others = tuple(hop for hop in replacements if hop.peer.peer_id != peer_id)
            if replacements and not others:
                continue  # it did the same in the end
            if self._is_lost.get(peer_id, True):
                continue
            self._is_lost[peer_id] = True
            failover = Failover(error.hop, str(error), error.what_happened, others)
            if len(self._unseen) < _MOST_UNSEEN:
                self._unseen.setdefault(peer_id, failover)

    def take(self) -> list[Failover]:
        """Return the failovers that are new."""
        failovers, self._unseen = list(self._unseen.values()), {}
        return failovers

    def take_recent_hops(self) -> list[Hop]:
        """Return the peers that answered since the last call, in the order of blocks."""
        hops, self._recent_hops = self._recent_hops.values(), {}
        return sorted(hops, key=lambda hop: (hop.span.start, hop.span.stop, hop.peer.peer_id))


class PassFailures(Failures):
    """The failures of one pass so far; its deadline starts with the first one."""

    def __init__(self, retry: Retry, now: Callable[[], float], timeout_seconds: float) -> None:
        super().__init__(retry)
        self.unable: dict[PeerId, RefusedError] = {}
        """Peers that have no memory for it, or found no holder of the adapter."""
        self.brought_again: set[PeerId] = set()
        """Peers that had lost an adapter, and got it once more."""
        self.least_version = 0
        """The least protocol version; peers of older versions are not asked."""
        self._lost: list[LostHopError] = []
        self._full_until: dict[PeerId, float] = {}
        self._now = now
        self._timeout_seconds = timeout_seconds
        self._error: RefusedError | RouteError | None = None

    @property
    def full(self) -> set[PeerId]:
        """Peers that have no room for an adapter at present, or are fetching it."""
        now = self._now()
        return {peer_id for peer_id, until in self._full_until.items() if now < until}

    @property
    def unwanted(self) -> set[PeerId]:
        """Peers that are not asked now."""
        if not self.is_known:
            return set()
        return {*self.refusals.peer_ids, *self.unable, *self.full}

    @property
    def is_known(self) -> bool:
        """Whether anything went wrong."""
        return self._error is not None

    def note(self, error: PeerFailure, span: Span) -> None:
        """Note a failure at some blocks."""
        if self.is_known:
            self.retry.note_failure()  # the second try comes at once
        else:
            self.retry.deadline = self._now() + self._timeout_seconds
        if isinstance(error, RefusedError | RouteError):
            self._error = error
        else:
            detail = f"no peer accepts passes for blocks {span}: {error}"
            self._error = RouteError(detail, [span])
            self._error.__cause__ = error

    def note_lost(self, lost: LostHopError) -> None:
        """Note a peer that has failed, for which it was blamed."""
        self.refusals.note(lost)
        self._lost.append(lost)

    def take_lost(self, span: Span) -> list[LostHopError]:
        """Return the peers that failed at some of these blocks since the last call."""
        lost = [
            one
            for one in self._lost
            if one.hop.span.start < span.stop and span.start < one.hop.span.stop
        ]
        self._lost = [one for one in self._lost if one not in lost]
        return lost

    def note_full(self, peer_id: PeerId, seconds: float) -> None:
        """Note that a peer cannot use an adapter yet, and said when to ask again."""
        self._full_until[peer_id] = self._now() + seconds

    async def wait_for_room(self) -> None:
        """Wait until one of those that were full may be asked again, or the time is up."""
        until = min([self.retry.deadline, *(self._full_until[peer_id] for peer_id in self.full)])
        await asyncio.sleep(max(0.0, until - self._now()))

    def raise_refusal(self) -> None:
        """Raise what a peer said against the texts, if one did: nobody else is left to ask."""
        refusal = self.refusals.first or next(iter(self.unable.values()), None)
        if refusal is not None:
            raise refusal

    async def pause(self) -> None:
        """Wait before the next try, longer each time; not at all before the first two.

        Raises what to say when the time is up: what a peer said against the texts, or else the
        newest failure, as RefusedError or RouteError.
        """
        if self._error is not None and self.retry.remaining_seconds <= 0:
            self.raise_refusal()
            raise self._error
        await self.retry.pause()


class PassAsker:
    """Chooses peers for passes and asks them. Owned by the client's loop."""

    def __init__(
        self, book: PeerBook, transport: Transport, config: ClientConfig, secret: bytes
    ) -> None:
        self._book = book
        self.clock = clock = book.clock
        self._config = config
        self._rng = random.Random(config.seed)
        self._links = PassLinks(transport, clock, secret, config.connect_timeout_seconds)
        self.uploads = AdapterUploads(clock)
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
        """Return whether a peer takes passes through a block, by the last known view."""
        weights = self._config.weights
        return any(takes_passes(peer, weights) for peer in self._book.view.serving(block))

    async def ask_forward(self, span: Span, texts: Texts, weights: str | None = None) -> SpanOutput:
        """Take texts through the first blocks of a span, as `weights` or as those of anybody.

        Raises RouteError with the blocks that nobody serves in time, RefusedError when every peer
        declines the texts, or one has too little memory for them; else what the last one did.
        """
        failures = self.make_failures()
        while True:
            hosts = await self._wait_for_hosts(span, failures, weights)
            hop = self._choose(hosts, span, texts.num_tokens, PassKind.FORWARD)
            part = texts.take_blocks(slice(0, len(hop.span)))
            answer = await self._try(hop, part, None, failures)
            if answer is not None:
                return SpanOutput(hop.span, hop.peer.weights, answer.hidden_BTH)

    async def ask_backward(
        self, span: Span, texts: Texts, grads_BTH: Tensor, weights: str
    ) -> TextGradients | None:
        """Return gradients of what went into a span, through the weights of the way there.

        None when no peer hosts all of it as such weights any more. Raises what `ask_forward` does.
        """
        failures = self.make_failures()
        while True:
            hosts = await self._wait_for_hosts(span, failures, weights)
            hosts = [peer for peer in hosts if peer.span.covers(span)]
            if not hosts:
                self.failovers.note(failures.take_lost(span), ())
                return None
            hop = self._choose(hosts, span, texts.num_tokens, PassKind.BACKWARD)
            answer = await self._try(hop, texts, grads_BTH, failures)
            if answer is not None:
                return answer

    async def choose_shard_peer(
        self, span: Span, failures: PassFailures, weights: str | None
    ) -> Hop:
        """Return the peer to train the first blocks of a span; raises what `ask_forward` does."""
        hosts = await self._wait_for_hosts(span, failures, weights)
        return self._choose(hosts, span, 1, PassKind.BACKWARD)

    async def ask_once(
        self,
        hop: Hop,
        texts: Texts,
        grads_BTH: Tensor | None = None,
        order: AccumulationOrder | None = None,
    ) -> TextGradients:
        """Ask one peer, once: for hidden states, or, given gradients, for those before them.

        Raises UnavailableError, RefusedError or RemoteProtocolError.
        """
        answer = await self._ask(hop, texts, grads_BTH, order=order)
        self.failovers.note_answer(hop)
        return answer

    @asynccontextmanager
    async def lend(
        self, hop: Hop, takes_turn: bool = True, is_wanted: Callable[[], bool] = lambda: True
    ) -> AsyncIterator[PassLink]:
        """Lend a stream to one peer; see `PassLinks.lend`."""
        async with self._links.lend(hop.peer, is_wanted, takes_turn) as link:
            self.failovers.note_reached(hop.peer.peer_id)
            yield link

    @contextmanager
    def carry(self, peer_id: PeerId, num_bytes: int) -> Iterator[float]:
        """Count bytes as under way to or from a peer; gives the seconds that they take at most, by
        what the line of this client and that to the peer have shown.
        """
        line, way = self._book.bandwidth, self._book.pass_times(peer_id).line
        with line.carry(num_bytes) as seconds:
            yield min(seconds, way.expect_seconds(line.num_bytes))

    def note_failure(
        self,
        hop: Hop,
        error: PeerFailure,
        failures: PassFailures,
        adapters: Sequence[SentAdapter] = (),
    ) -> None:
        """Note that a peer did not do what it was asked, with these adapters, and blame it for what
        is its fault.
        """
        failures.note(error, hop.span)
        if not isinstance(error, RefusedError) or not self._is_excused(
            error, hop, failures, adapters
        ):
            lost = self._book.blame(hop, error, self._forgiven)
            lost.__cause__ = error
            failures.note_lost(lost)

    async def bring(
        self, link: PassLink, adapters: Sequence[SentAdapter], span: Span, is_trained: bool
    ) -> None:
        """See that a peer has the adapters for some blocks; raises what `PassLink.bring` does."""
        send = partial(self.send_adapter, link)
        await self.uploads.bring(link.peer.peer_id, adapters, span, is_trained, send)

    async def send_adapter(self, link: PassLink, head: AdapterHead, tensors: bytes) -> float:
        """Upload an adapter to a peer; return how long it is kept unused. Raises what links do."""
        peer_id = link.peer.peer_id
        with self.carry(peer_id, len(tensors)) as carrying_seconds:
            patience_seconds = _LEAST_UPLOAD_SECONDS + _UPLOAD_PATIENCE * carrying_seconds
            try:
                return await link.bring(head, tensors, carrying_seconds, patience_seconds)
            except SilentError:
                for line in (self._book.bandwidth, self._book.pass_times(peer_id).line):
                    line.note_silence(len(tensors))
                raise

    async def list_peers(self) -> list[Announcement]:
        """Return peers that serve blocks now and take adapters, least in doubt first; no liars."""
        await self._refresh(0.0)
        return self._book.list_by_doubt()

    def find_peer(self, peer_id: PeerId) -> Announcement | None:
        """Return what a peer announced, as far as was heard last; None once it has left."""
        peer = self._book.view.find(peer_id)
        return None if peer is None or peer.state is PeerState.OFFLINE else peer

    def make_route_error(self, span: Span, weights: str | None = None) -> RouteError:
        """Return what to say where nobody takes passes through some blocks of a span."""
        gaps = self._book.view.gaps
        missing = [gap for gap in gaps if gap.start < span.stop and span.start < gap.stop]
        missing = missing or [Span(span.start, span.start + 1)]
        names = ", ".join(map(str, missing))
        suffix = "" if weights is None else f" with {weights} weights"
        detail = f"no reachable peer serves blocks {names} for fine-tuning{suffix}"
        return RouteError(detail, missing)

    async def close(self) -> None:
        """Close all connections."""
        await self._links.close()

    async def _try(
        self, hop: Hop, texts: Texts, grads_BTH: Tensor | None, failures: PassFailures
    ) -> TextGradients | None:
        """Ask one peer; None when it failed, for which it is blamed."""
        try:
            # Others may have found out meanwhile that the peer is dead.
            is_wanted = partial(self._is_wanted, hop, failures)
            answer = await self._ask(hop, texts, grads_BTH, is_wanted)
        except NotWantedError:
            return None
        except (UnavailableError, RemoteProtocolError, RefusedError) as error:
            self.note_failure(hop, error, failures, list_adapters(texts.adapters))
            return None
        if failures.is_known:
            for liar in failures.refusals.contradicted:
                self._book.quarantine(liar.peer, Fault.BROKEN)
            self.failovers.note(failures.take_lost(hop.span), (hop,))
        self._book.note_pass(hop.peer.peer_id)
        self.failovers.note_answer(hop)
        return answer

    def _is_excused(
        self,
        error: RefusedError,
        hop: Hop,
        failures: PassFailures,
        adapters: Sequence[SentAdapter],
    ) -> bool:
        """Note a refusal that is neither the peer's fault nor that of the texts."""
        peer_id = hop.peer.peer_id
        if error.code is ErrorCode.UNKNOWN_ADAPTER:
            self.uploads.forget(peer_id)
            if all(isinstance(one, AdapterVersion) for one in adapters):
                # It has expired, or the peer was restarted: it gets it again, but only once.
                is_sound = peer_id not in failures.brought_again
                failures.brought_again.add(peer_id)
                return is_sound
            # A published one is fetched by the peer, which says when to ask again, or gives up.
            may_pass = all(isinstance(one, PublishedAdapter) for one in adapters)
        elif error.code in (ErrorCode.OUT_OF_MEMORY, ErrorCode.NO_ROOM_FOR_ADAPTER):
            may_pass = error.code is ErrorCode.NO_ROOM_FOR_ADAPTER
        else:
            return False
        if may_pass and error.retry_after_seconds is not None:
            failures.note_full(peer_id, error.retry_after_seconds)
        else:
            failures.unable[peer_id] = error
        return True

    def make_failures(self) -> PassFailures:
        """Return what to note the failures of passes in."""
        retry, seconds = Retry(_AGAIN, self.clock), self._config.failover_timeout_seconds
        return PassFailures(retry, self.clock.now, seconds)

    async def _ask(
        self,
        hop: Hop,
        texts: Texts,
        grads_BTH: Tensor | None,
        is_wanted: Callable[[], bool] = lambda: True,
        order: AccumulationOrder | None = None,
    ) -> TextGradients:
        """Ask one peer for hidden states, or, given gradients, for those before them."""
        await cut_adapters(list_adapters(texts.adapters), hop.span)
        is_backward, wire_dtype = grads_BTH is not None, self._config.wire_dtype
        scale = 1.0
        if grads_BTH is not None and wire_dtype == "fp16":
            scale = choose_scale(grads_BTH)
            grads_BTH = scale * grads_BTH
        asked = replace(
            texts.make_pass(hop, wire_dtype, is_backward=is_backward),
            accumulate=order and replace(order, scale=1 / scale),
        )
        num_bytes = texts.count_bytes(asked)
        bandwidth, num_tokens = self._book.bandwidth, texts.num_tokens
        times = self._book.pass_times(hop.peer.peer_id)
        way = times.line
        expected_seconds = times.expect_seconds(hop, num_tokens, asked.kind)
        patience_seconds = _LEAST_PATIENCE_SECONDS + _PATIENCE * expected_seconds
        with times.count(expected_seconds):
            async with self.lend(hop, is_wanted=is_wanted) as link:
                adapters = list_adapters(texts.adapters)
                await self.bring(link, adapters, hop.span, texts.trains_adapters)
                asked_at = self.clock.now()
                with self.carry(hop.peer.peer_id, num_bytes) as carrying_seconds:
                    answer = await link.ask(
                        asked,
                        texts.list_tensors(grads_BTH),
                        carrying_seconds,
                        patience_seconds + carrying_seconds,
                    )
        self._forgiven.discard(hop.peer.peer_id)
        # Claims that the peer could make up count for its own line only.
        bandwidth.note_answer(num_bytes, self.clock.now() - asked_at)
        way.note_answer(num_bytes, answer.way_seconds)
        times.note(hop, num_tokens, asked.kind, asked_at, self.clock.now(), answer.way_seconds)
        gradients = TextGradients.read(answer.tensors, texts, hop.span)
        return gradients if scale == 1.0 else gradients.multiply(1 / scale)

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

    def _is_wanted(self, hop: Hop, failures: PassFailures) -> bool:
        hosts = self._find_hosts(hop.span.start, failures, hop.peer.weights)
        return any(peer.peer_id == hop.peer.peer_id for peer in hosts)

    async def _wait_for_hosts(
        self, span: Span, failures: PassFailures, weights: str | None
    ) -> list[Announcement]:
        """Return the least doubtful peers that take passes through the first block of a span."""
        weights = weights or self._config.weights
        while True:
            await failures.pause()
            await self._refresh(self._config.refresh_seconds)
            hosts = self._find_hosts(span.start, failures, weights)
            if hosts:
                return hosts
            if failures.full:
                await failures.wait_for_room()
                continue
            failures.raise_refusal()
            await self._refresh(0.0)
            hosts = self._find_hosts(span.start, failures, weights)
            if hosts:
                return hosts
            failures.note(self.make_route_error(span, weights), span)

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
        self, block: int, failures: PassFailures, weights: str | None
    ) -> list[Announcement]:
        return self._book.find_pass_hosts(block, failures.unwanted, weights, failures.least_version)


@dataclass(frozen=True)
class SessionAdapter:
    """The adapter of a session as it was when that was opened; each hop has to have it before."""

    adapter: SentAdapter
    asker: PassAsker

    @property
    def is_published(self) -> bool:
        """Whether hops fetch it themselves."""
        return isinstance(self.adapter, PublishedAdapter)

    async def name_for(self, span: Span) -> AdapterId:
        """Return what a hop with these blocks knows it by."""
        await cut_adapters([self.adapter], span)
        part = self.adapter.cut(span)
        return NO_ADAPTER if part is None else part.name

    async def bring(self, hop: Hop) -> None:
        """Give it to a hop that may not have it; raises what `PassLink.bring` does."""
        if isinstance(self.adapter, AdapterVersion) and await self.name_for(hop.span):
            async with self.asker.lend(hop) as link:
                await self.asker.bring(link, [self.adapter], hop.span, is_trained=False)

    def note_failure(self, hop: Hop, error: ShoalError) -> None:
        """Note that a hop has lost it, if that is what it said: it gets it again."""
        if isinstance(error, RefusedError) and error.code is ErrorCode.UNKNOWN_ADAPTER:
            self.asker.uploads.forget(hop.peer.peer_id)
