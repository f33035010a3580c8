"""The hops of a session: found for a part of its route, and opened there, all of them at once."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import nullcontext
from typing import cast

from ...protocol.errors import (
    DirectoryError,
    ErrorCode,
    RefusedError,
    RemoteProtocolError,
    RouteError,
    UnavailableError,
)
from ...protocol.ids import NO_ADAPTER, NO_CLIENT, ClientToken, PeerId, SessionId, make_client_token
from ...protocol.messages.passes import PassPiece
from ...protocol.messages.session import Open
from ...protocol.net.retry import Backoff, Retry
from ...protocol.records.announcements import Announcement
from ...protocol.session.recovery_log import RecoveryLog
from ...protocol.spans import Span
from ...protocol.tensors import WireDtype
from ...protocol.versions import INT8_VERSION, PASS_VERSION
from ..routing.peer_book import FLOOR_SECONDS
from ..routing.route import Ends, Hop, LostHopError, Refusals, Route
from .deep_prompts import encode_prompts
from .hop_link import HopLink, LiveHop, Mailbox, MissingHops
from .state import SessionContext, Waiting

_logger = logging.getLogger(__name__)

_AGAIN = Backoff(0.05, 1.0, jitter_fraction=0.25)
"""Between routes that are tried; longer once all peers were. Clients that lost the same peer must
not all come back to its replica at the same moment."""

_RETRY_VIEW_SECONDS = 1.0
"""How old the view may be once a peer that was found in it has failed."""

_FIRST_LOOK_FRACTION = 0.3
"""How much of the time to connect a peer gets that has never worked for us, until everybody was
asked once: announcing costs nothing, and a few silent peers would use up all the time there is."""

_SHORT_SECONDS = 0.5
"""Seconds that a peer gets to open a session even after the deadline."""

_LONGEST_STEP_TOKENS = 2048
"""A step that a peer may be computing when another client connects."""

BringUp = Callable[[list[LiveHop], MissingHops, float, float], Awaitable[None]]
"""Opens the hops of a route before a deadline, waiting for room so long, and brings them
to the state of its log. Raises LostHopError for one that has to be replaced; none is open then."""


class HopFinder:
    """Finds and opens the hops of one session."""

    def __init__(self, state: SessionContext, mailbox: Mailbox) -> None:
        self._state = state
        self._mailbox = mailbox

    async def cover(
        self,
        missing: MissingHops,
        deadline: float,
        refusals: Refusals,
        bring_up: BringUp,
        preferred: str | None = None,
    ) -> list[LiveHop]:
        """Find hops for missing ones, and have them brought to the state of their log in time.

        `preferred` is the weight format of the peer that was lost: its replica computes the
        same. When the time is up, or nobody is there and a hop beside them is about to leave,
        raises RouteError with the missing blocks, and those of the rest of the session that nobody
        serves either, or a refusal: RefusedError of a peer that declined for good, also where
        others could not be reached. Also raises what `bring_up` does but LostHopError, after which
        another route is tried.
        """
        state = self._state
        if missing.position == 0:  # later, somebody waits for the next token
            await state.swarm.survey()
        configured = state.config.weights
        weights = (configured,) if configured else tuple(dict.fromkeys((preferred, None)))
        tried: set[PeerId] = set()
        retry = Retry(_AGAIN, state.clock, deadline, state.rng)
        retry.note_failure()  # even the second route is not tried at once
        max_wait_seconds = 0.0
        while True:
            num_tried = len(tried)
            try:
                route = await self._find_route(missing, weights, deadline, refusals, tried)
            except RouteError as error:
                raise self._add_gaps(error, missing.span, weights) from None
            if len(tried) < num_tried:
                # All peers were asked once. A full one may take us into its queue now, for a part
                # of the time: another one may have room sooner.
                if missing.leaving_neighbours:
                    raise RouteError(f"no peer takes over blocks {missing.span}", (missing.span,))
                is_alone = num_tried == 1
                remaining_seconds = max(0.0, retry.remaining_seconds)
                max_wait_seconds = remaining_seconds / (1 if is_alone else 2 * num_tried)
                retry.note_failure()  # nobody is to be stormed
            state.begin(route)
            hops = [LiveHop(hop, RecoveryLog()) for hop in route.hops]
            try:
                await bring_up(hops, missing, deadline, max_wait_seconds)
                return hops
            except LostHopError as lost:
                tried.add(lost.hop.peer.peer_id)
                refusals.note(lost)
                if retry.remaining_seconds <= 0:
                    if refusals.first is not None:
                        raise refusals.first from None
                    if isinstance(lost.__cause__, RefusedError):
                        raise lost.__cause__ from None
                    raise self._make_unreachable_error(lost, weights) from lost.__cause__
            await retry.pause()

    def _add_gaps(self, error: RouteError, span: Span, weights: Sequence[str | None]) -> RouteError:
        """Return what a search for `span` raised, with what else of the session nobody serves."""
        gaps = self._state.swarm.find_gaps(self._state.facts.span, weights)
        if gaps is None or all(span.covers(gap) for gap in cast("Sequence[Span]", gaps.missing)):
            return error
        return RouteError(f"{error}; {gaps}", gaps.missing)

    def _make_unreachable_error(
        self, lost: LostHopError, weights: Sequence[str | None]
    ) -> RouteError:
        gaps = self._state.swarm.find_gaps(self._state.facts.span, weights)
        also, more = ("", ()) if gaps is None else (f"; {gaps}", gaps.missing)
        return RouteError(
            f"no peer could be reached in time for blocks {lost.hop.span}: {lost}{also}; "
            "run `shoal doctor MODEL --join CODE` to find out why",
            (lost.hop.span, *more),
        )

    async def _find_route(
        self,
        missing: MissingHops,
        weights: Sequence[str | None],
        deadline: float,
        refusals: Refusals,
        tried: set[PeerId],
    ) -> Route:
        """Return the next route to try: over peers not tried yet, as long as there are any.

        Or else the busy one that is cheapest would be asked over and over, and others never. Then
        `tried` is emptied and the next round begins.

        Once a peer has declined for good, only others that are there now may help: a caller
        that asked for too much gets the refusal at once.
        """
        # Somebody waits for the next token: what is known here comes first, however old. If it led
        # to nobody, newcomers must be seen before silent peers are asked once more.
        max_age_seconds = self._state.config.refresh_seconds
        if missing.position > 0:
            self._state.book.take_view()
            max_age_seconds = math.inf
        wait = functools.partial(
            self._state.swarm.wait_for_route,
            missing.span,
            needed_kv_tokens=self._state.facts.count_kv_tokens(self._state.num_rows),
            ends=missing.ends if self._state.config.delivery == "chain" else None,
        )
        if tried:
            max_age_seconds = min(_RETRY_VIEW_SECONDS, self._state.config.refresh_seconds)
            with contextlib.suppress(RouteError, DirectoryError):
                avoided = {*tried, *refusals.peer_ids}
                return await wait(self._state.clock.now(), max_age_seconds, weights, avoided)
            tried.clear()
        if refusals.first is None:
            return await wait(
                deadline, max_age_seconds, weights, may_wait=lambda: not missing.leaving_neighbours
            )
        try:
            return await wait(self._state.clock.now(), 0.0, weights, refusals.peer_ids)
        except (RouteError, DirectoryError):
            raise refusals.first from None

    async def find_replica(self, hop: Hop, exclude: Collection[PeerId], ends: Ends | None) -> Hop:
        """Return a peer that computes the very same as a hop. Raises RouteError, DirectoryError."""
        route = await self._state.swarm.wait_for_route(
            hop.span,
            self._state.clock.now(),
            min(_RETRY_VIEW_SECONDS, self._state.config.refresh_seconds),
            (hop.peer.weights,),
            exclude,
            self._state.facts.count_kv_tokens(self._state.num_rows),
            ends,
        )
        if len(route.hops) != 1:
            raise RouteError(f"no single peer serves blocks {hop.span}", (hop.span,))
        return route.hops[0]

    def has_replica(self, hop: Hop, others: Collection[PeerId]) -> bool:
        """Return whether a peer beside those could take a hop's place alone, by what was heard."""
        return any(
            peer.span.covers(hop.span)
            and peer.weights == hop.peer.weights
            and peer.peer_id not in others
            for peer in self._state.book.view.online
        )

    async def open(self, hops: Sequence[LiveHop], deadline: float, max_wait_seconds: float) -> None:
        """Open the links of hops; some are open even when it raises what the first failure was."""
        results = await asyncio.gather(
            *(self.open_link(live, deadline, max_wait_seconds) for live in hops),
            return_exceptions=True,
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def open_link(
        self,
        live: LiveHop,
        deadline: float,
        max_wait_seconds: float = 0.0,
        parent: SessionId | None = None,
        prefix_tokens: int = 0,
    ) -> None:
        """Open the session of one hop, under an id of its own; LostHopError if that fails.

        With a `parent`, it begins with the first `prefix_tokens` tokens of that one.
        """
        hop, adapter = live.hop, self._state.facts.adapter
        recorder = self._state.recorder
        recording = nullcontext() if recorder is None else recorder.opening(hop)

        def note_queued(seconds: float) -> None:
            self._state.waiting = Waiting(hop, seconds)
            _logger.info("the session waits for admission: %s", self._state.waiting)

        with recording:
            self._check_version(hop)
            opening = await self._make_opening(live, max_wait_seconds, parent, prefix_tokens)
            pieces = self._encode_prompts(opening)
            timeout_seconds = self._choose_timeout_seconds(hop, deadline, max_wait_seconds == 0)
            try:
                if adapter is not None:
                    await adapter.bring(hop)
                with self._state.book.bandwidth.carry(_count_bytes(pieces)) as carrying_seconds:
                    live.link, rtt_seconds = await HopLink.open(
                        self._state.transport,
                        self._state.clock,
                        hop,
                        opening,
                        self._name_for(hop),
                        timeout_seconds + carrying_seconds,
                        note_queued,
                        pieces,
                    )
            except (UnavailableError, RemoteProtocolError, RefusedError) as error:
                if adapter is not None:
                    adapter.note_failure(hop, error)
                if isinstance(error, RefusedError) and error.code is ErrorCode.UNKNOWN_ADAPTER:
                    is_fetching = error.retry_after_seconds is not None
                    if is_fetching or (adapter is not None and adapter.is_published):
                        # It is sound. It is asked again after the others, unless nobody has it.
                        raise LostHopError(hop, str(error), is_final=not is_fetching) from error
                raise self._state.book.blame(hop, error, self._state.forgiven) from error
            finally:
                if self._state.waiting is not None and self._state.waiting.hop is hop:
                    self._state.waiting = None  # not that of another hop
            live.link.on_leaving = self._state.on_leaving
            live.link.listen(self._mailbox)
            self._state.book.note_rtt(hop.peer.peer_id, rtt_seconds)

    async def _make_opening(
        self,
        live: LiveHop,
        max_wait_seconds: float,
        parent: SessionId | None,
        prefix_tokens: int,
    ) -> Open:
        assert self._state.wire_dtype is not None
        span, adapter, prompts = live.hop.span, self._state.facts.adapter, self._state.prompts_LBPH
        prompt_rows, prompt_tokens = (0, 0) if prompts is None else prompts.shape[1:3]
        # First: the epoch may be another one afterwards.
        adapter_id = NO_ADAPTER if adapter is None else await adapter.name_for(span)
        return Open(
            self._state.name_session(span),
            self._state.epoch,
            self._state.facts.model_id,
            span,
            self._state.num_rows,
            self._state.facts.max_tokens,
            self._state.wire_dtype,
            max_wait_seconds,
            self._state.facts.kv_format,
            parent=parent,
            prefix_tokens=0 if parent is None else prefix_tokens,
            capability=live.capability,
            next=live.next,
            adapter=adapter_id,
            prompt_rows=prompt_rows,
            prompt_tokens=prompt_tokens,
        )

    def _check_version(self, hop: Hop) -> None:
        """Raise LostHopError when a peer is too old for what the session needs."""
        if self._state.wire_dtype is WireDtype.INT8 and hop.peer.max_version < INT8_VERSION:
            raise LostHopError(hop, "its version is too old for hidden states in int8")
        if self._state.prompts_LBPH is not None and hop.peer.max_version < PASS_VERSION:
            raise LostHopError(hop, "its version is too old for deep prompts")

    def _encode_prompts(self, opening: Open) -> list[PassPiece]:
        if self._state.prompts_LBPH is None:
            return []
        start, span = self._state.facts.span.start, opening.span
        prompts_LBPH = self._state.prompts_LBPH[span.start - start : span.stop - start]
        # Rounded to 8 bits they would be others than those that were trained.
        dtype = WireDtype.BF16 if opening.dtype is WireDtype.INT8 else opening.dtype
        return encode_prompts(opening.session, prompts_LBPH, dtype)

    def _choose_timeout_seconds(self, hop: Hop, deadline: float, is_first_look: bool) -> float:
        longest_seconds = self._state.config.connect_timeout_seconds
        if is_first_look and not self._state.book.times(hop.peer.peer_id).has_answered:
            longest_seconds *= _FIRST_LOOK_FRACTION
        left_seconds = max(deadline - self._state.clock.now(), _SHORT_SECONDS)
        return choose_open_timeout_seconds(hop.peer, min(longest_seconds, left_seconds))

    def _name_for(self, hop: Hop) -> ClientToken:
        secret = self._state.facts.client_secret
        return make_client_token(secret, hop.peer.peer_id) if secret else NO_CLIENT


def _count_bytes(pieces: Sequence[PassPiece]) -> int:
    return sum(len(piece.tensor.data) for piece in pieces)


def choose_open_timeout_seconds(peer: Announcement, longest_seconds: float) -> float:
    """Return how long a peer may take to accept a connection and open a session.

    It answers between two steps, its own or those of others, the longest of them a prompt.
    """
    if not peer.prefill_tokens_per_second:
        return longest_seconds
    prompt_seconds = _LONGEST_STEP_TOKENS / peer.prefill_tokens_per_second
    return min(FLOOR_SECONDS + peer.queue_seconds + prompt_seconds, longest_seconds)
