"""Asks for one pass through one hop, peer after peer until one answers."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import secrets
from functools import partial

from torch import Tensor

from ...protocol.announcements import Announcement
from ...protocol.errors import (
    DirectoryError,
    ErrorCode,
    RefusedError,
    RemoteProtocolError,
    RouteError,
    UnavailableError,
)
from ...protocol.ids import PassId, PeerId, SessionId
from ...protocol.messages import Pass, PassKind, Slot
from ...protocol.net.clock import Clock
from ...protocol.net.transport import Transport
from ...protocol.passes import list_answer_slots, list_question_slots
from ...protocol.spans import Span
from ...protocol.swarm_view import SwarmView
from ...protocol.tensors import WireDtype, compute_num_bytes
from ...protocol.versions import PASS_VERSION
from ..blame import Refusals, blame
from ..config import ClientConfig
from ..router import Hop
from ..swarm import Fault, Swarm
from .microbatches import TextGradients, Texts
from .pass_link import PassAnswer
from .pass_links import NotWantedError, PassLinks
from .pass_speeds import PassSpeeds

_logger = logging.getLogger(__name__)

_Failure = UnavailableError | RemoteProtocolError | RefusedError

_PAUSE_SECONDS = 0.1

_DIRECTORY_SECONDS = 5.0
"""How long the directory may take before the last view has to do."""

_PATIENCE = 20.0
_LEAST_PATIENCE_SECONDS = 60.0
"""A peer that goes on saying that it is at a pass is left after so many times what it should take:
others may be waiting there as well, or it lies."""


class _Trouble:
    """What went wrong with one pass so far: there is a deadline from the first failure on."""

    def __init__(self, span: Span, clock: Clock, timeout_seconds: float) -> None:
        self.refusals = Refusals()
        self.too_small: set[PeerId] = set()
        """Peers that have no memory for it."""
        self._span = span
        self._clock = clock
        self._timeout_seconds = timeout_seconds
        self._deadline = math.inf
        self._num_failures = 0
        self._error: _Failure | None = None

    @property
    def is_known(self) -> bool:
        """Whether anything went wrong."""
        return self._num_failures > 0

    def note(self, error: _Failure) -> None:
        """Note a failure."""
        if not self.is_known:
            self._deadline = self._clock.now() + self._timeout_seconds
        self._num_failures += 1
        self._error = error

    def raise_refusal(self) -> None:
        """Raise what a peer said against the texts, if one did: nobody else is left to ask."""
        if self.refusals.first is not None:
            raise self.refusals.first
        if self.too_small and self._error is not None:
            raise self._error

    async def pause(self) -> None:
        """Wait before the next try, longer each time; not at all before the first two.

        Raises what to say when the time is up: the newest refusal, or RouteError.
        """
        seconds = self._deadline - self._clock.now()
        if self._error is not None and seconds <= 0:
            if isinstance(self._error, RefusedError | RouteError):
                raise self._error
            detail = f"no peer takes blocks {self._span} any more: {self._error}"
            raise RouteError(detail, [self._span]) from self._error
        if self._num_failures > 1:
            pause_seconds = _PAUSE_SECONDS * 2.0 ** min(self._num_failures - 2, 4)
            await asyncio.sleep(min(pause_seconds, seconds))


class PassAsker:
    """What a client knows of peers that take passes. Owned by the client's loop."""

    def __init__(
        self, swarm: Swarm, transport: Transport, clock: Clock, config: ClientConfig, secret: bytes
    ) -> None:
        self._swarm = swarm
        self._clock = clock
        self._config = config
        self._speeds = PassSpeeds(random.Random(config.seed))
        self._links = PassLinks(transport, clock, secret, config.connect_timeout_seconds)
        self._forgiven: set[PeerId] = set()
        self._recent_hops: dict[PeerId, Hop] = {}
        self._refreshing = asyncio.Lock()

    def guess_num_hops(self, span: Span) -> int:
        """Return how many hops a way through a span has at least."""
        longest = max((len(peer.span) for peer in self._swarm.view.online), default=len(span))
        return -(-len(span) // longest)

    async def ask_forward(self, span: Span, texts: Texts) -> tuple[Span, Tensor]:
        """Take texts through the first blocks of a span; return which, and what came out.

        Raises RouteError with the blocks that nobody serves in time, RefusedError when every peer
        declines the texts, or one has too little memory for them; else what the last one did.
        """
        trouble = self._make_trouble(span)
        while True:
            hosts = await self._wait_for_hosts(span, trouble)
            hop = self._speeds.choose(hosts, span, texts.num_tokens, PassKind.FORWARD)
            part = texts.take_blocks(slice(0, len(hop.span)))
            answer = await self._try(hop, part, None, trouble)
            if answer is not None:
                return hop.span, answer.tensors[Slot.HIDDEN].view(texts.hidden_BTH.shape)

    async def ask_backward(
        self, span: Span, texts: Texts, grads_BTH: Tensor
    ) -> TextGradients | None:
        """Return gradients of what went into a span; None when nobody hosts all of it any more.

        Raises what `ask_forward` does.
        """
        trouble = self._make_trouble(span)
        while True:
            hosts = await self._wait_for_hosts(span, trouble)
            hosts = [peer for peer in hosts if peer.span.covers(span)]
            if not hosts:
                return None
            hop = self._speeds.choose(hosts, span, texts.num_tokens, PassKind.BACKWARD)
            answer = await self._try(hop, texts, grads_BTH, trouble)
            if answer is not None:
                prompts = answer.tensors.get(Slot.PROMPTS)
                if prompts is not None and texts.prompts_LBPH is not None:
                    prompts = prompts.view(texts.prompts_LBPH.shape)
                hidden_BTH = answer.tensors[Slot.HIDDEN].view(texts.hidden_BTH.shape)
                return TextGradients(hidden_BTH, prompts)

    def take_recent_hops(self) -> list[Hop]:
        """Return who answered since this was called last, in the order of blocks."""
        hops, self._recent_hops = self._recent_hops.values(), {}
        return sorted(hops, key=lambda hop: (hop.span.start, hop.span.stop, hop.peer.peer_id))

    async def close(self) -> None:
        """Hang up on everybody."""
        await self._links.close()

    async def _try(
        self, hop: Hop, texts: Texts, grads_BTH: Tensor | None, trouble: _Trouble
    ) -> PassAnswer | None:
        """Ask one peer; None when it failed, for which it is blamed."""
        try:
            answer = await self._ask(hop, texts, grads_BTH, trouble)
        except NotWantedError:
            return None
        except (UnavailableError, RemoteProtocolError, RefusedError) as error:
            if isinstance(error, RefusedError) and error.code is ErrorCode.OUT_OF_MEMORY:
                trouble.too_small.add(hop.peer.peer_id)
                trouble.note(error)
                return None
            lost = blame(self._swarm, hop, error, self._forgiven)
            lost.__cause__ = error
            trouble.refusals.note(lost)
            trouble.note(error)
            return None
        for liar in trouble.refusals.contradicted:
            self._swarm.quarantine(liar.peer, Fault.BROKEN)
        self._swarm.note_pass(hop.peer.peer_id)
        self._recent_hops[hop.peer.peer_id] = hop
        return answer

    def _make_trouble(self, span: Span) -> _Trouble:
        return _Trouble(span, self._clock, self._config.failover_timeout_seconds)

    async def _ask(
        self, hop: Hop, texts: Texts, grads_BTH: Tensor | None, trouble: _Trouble
    ) -> PassAnswer:
        asked = self._make_pass(hop, texts, grads_BTH is not None)
        tensors = _list_tensors(texts, grads_BTH)
        slots = (*list_question_slots(asked).values(), *list_answer_slots(asked).values())
        width = texts.hidden_BTH.shape[-1]
        num_bytes = compute_num_bytes(asked.dtype, 1, sum(slots), width)
        line, num_tokens = self._swarm.line, texts.num_tokens
        patience_seconds = _LEAST_PATIENCE_SECONDS + _PATIENCE * self._speeds.expect_seconds(
            hop, num_tokens, asked.kind
        )
        with self._speeds.counting(hop, num_tokens, asked.kind):
            # Others may have found out meanwhile that the peer is dead.
            is_wanted = partial(self._is_wanted, hop, trouble)
            async with self._links.lend(hop.peer, is_wanted) as link:
                asked_at = self._clock.now()
                with line.carry(num_bytes) as carrying_seconds:
                    answer = await link.ask(
                        asked, tensors, carrying_seconds, patience_seconds + carrying_seconds
                    )
        own_seconds = answer.queue_seconds + answer.compute_seconds
        way_seconds = max(self._clock.now() - asked_at - own_seconds, 0.0)
        line.note_answer(num_bytes, way_seconds)
        self._speeds.note(hop, num_tokens, asked.kind, answer.compute_seconds, way_seconds)
        return answer

    def _is_wanted(self, hop: Hop, trouble: _Trouble) -> bool:
        hosts = self._find_hosts(hop.span.start, trouble)
        return any(peer.peer_id == hop.peer.peer_id for peer in hosts)

    def _make_pass(self, hop: Hop, texts: Texts, is_backward: bool) -> Pass:
        num_rows, num_tokens, _ = texts.hidden_BTH.shape
        prompts = texts.prompts_LBPH
        prompt_rows, prompt_tokens = (0, 0) if prompts is None else prompts.shape[1:3]
        return Pass(
            PassId(SessionId(secrets.token_bytes(16))),
            PassKind.BACKWARD if is_backward else PassKind.FORWARD,
            hop.peer.model_id,
            hop.span,
            num_rows,
            num_tokens,
            self._choose_dtype(hop.peer),
            prompt_rows,
            prompt_tokens,
        )

    def _choose_dtype(self, peer: Announcement) -> WireDtype:
        if self._config.wire_dtype != "auto":
            return WireDtype[self._config.wire_dtype.upper()]
        return WireDtype.FP32 if peer.weights == "fp32" else WireDtype.BF16

    async def _wait_for_hosts(self, span: Span, trouble: _Trouble) -> list[Announcement]:
        """Return the least doubtful peers that take passes through the first block of a span."""
        while True:
            await trouble.pause()
            await self._refresh(self._config.refresh_seconds)
            hosts = self._find_hosts(span.start, trouble)
            if hosts:
                return hosts
            trouble.raise_refusal()
            await self._refresh(0.0)
            hosts = self._find_hosts(span.start, trouble)
            if hosts:
                return hosts
            trouble.note(_make_route_error(span, self._swarm.view))

    async def _refresh(self, max_age_seconds: float) -> None:
        """Read the directory, one for all that ask; where that fails, the last view has to do."""
        async with self._refreshing:
            try:
                async with asyncio.timeout(_DIRECTORY_SECONDS):
                    await self._swarm.refresh(max_age_seconds)
            except (DirectoryError, TimeoutError) as error:
                _logger.debug("the last view has to do: %r", error)

    def _find_hosts(self, block: int, trouble: _Trouble) -> list[Announcement]:
        hosts = self._swarm.find_hosts(block, {*trouble.refusals.peer_ids, *trouble.too_small})
        weights = self._config.weights
        return [
            peer
            for peer in hosts
            if peer.max_version >= PASS_VERSION and weights in (None, peer.weights)
        ]


def _list_tensors(texts: Texts, grads_BTH: Tensor | None) -> dict[Slot, Tensor]:
    """Return the tensors of a question as vectors, [N, H]."""
    width = texts.hidden_BTH.shape[-1]
    tensors = {Slot.HIDDEN: texts.hidden_BTH.reshape(-1, width)}
    if grads_BTH is not None:
        tensors[Slot.GRADIENTS] = grads_BTH.reshape(-1, width)
    if texts.prompts_LBPH is not None:
        tensors[Slot.PROMPTS] = texts.prompts_LBPH.reshape(-1, width)
    return tensors


def _make_route_error(span: Span, view: SwarmView) -> RouteError:
    missing = [gap for gap in view.gaps if gap.start < span.stop and span.start < gap.stop]
    missing = missing or [Span(span.start, span.start + 1)]
    names = ", ".join(map(str, missing))
    return RouteError(f"no reachable peer serves blocks {names} for fine-tuning", missing)
