"""Opens the hops of a route for one session: all of them at once, each under an id of its own."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch import Tensor

from ...protocol.errors import RefusedError, RemoteProtocolError, UnavailableError
from ...protocol.ids import (
    CAPABILITY_BYTES,
    NO_ADAPTER,
    NO_CAPABILITY,
    NO_CLIENT,
    SESSION_ID_BYTES,
    Capability,
    ClientToken,
    ModelId,
    PeerId,
    SessionId,
    make_client_token,
)
from ...protocol.messages.session import NextHop, Open, PassPiece
from ...protocol.net.clock import Clock
from ...protocol.net.transport import Transport
from ...protocol.records.announcements import Announcement
from ...protocol.session.recovery_log import RecoveryLog
from ...protocol.spans import Span
from ...protocol.tensors import KVFormat, WireDtype, compute_num_bytes
from ...protocol.versions import INT8_VERSION, PASS_VERSION
from ..passes.session_adapter import SessionAdapter
from ..routing.deadlines import choose_open_timeout_seconds
from ..routing.peer_book import LostHopError
from ..routing.route import Hop, Route
from ..routing.swarm import Swarm
from ..settings.config import ClientConfig
from ..trace.trace import Recorder
from .deep_prompts import encode_prompts
from .hop_link import HopLink
from .mailbox import Mailbox

if TYPE_CHECKING:
    from .asking import Question

_logger = logging.getLogger(__name__)

_FIRST_LOOK_FRACTION = 0.3
"""How much of the time to connect a peer gets that has never worked for us, until everybody was
asked once: announcing costs nothing, and a few silent peers would use up all the time there is."""

_FLOAT_TOKENS = {KVFormat.FLOAT: 1.0, KVFormat.INT8: 0.5}
"""Tokens of floats that a token takes the room of. Half is true where peers compute in 16 bits."""

_SHORT_SECONDS = 0.5
"""What a peer gets to open a session even when time is up."""


@dataclass(frozen=True)
class SessionFacts:
    """What a session is opened with.

    `session` never leaves the client: the id at each hop is derived from it. So no peer can step
    the session at another peer, and one that serves two spans of a route holds two sessions.
    """

    session: SessionId
    model_id: ModelId
    span: Span
    hidden_size: int
    max_tokens: int
    client_secret: bytes = b""
    """What the client's name at each peer is made of; empty: it has none."""
    kv_format: KVFormat = KVFormat.FLOAT
    adapter: SessionAdapter | None = None

    def count_kv_tokens(self, num_rows: int) -> float:
        """Return how much room so many rows may need, in the tokens that announcements count."""
        return num_rows * self.max_tokens * _FLOAT_TOKENS[self.kv_format]


@dataclass(eq=False)
class LiveHop:
    """A hop in use: its link, None once lost, and a log of everything that was sent to it.

    Hops of which each `feeds` the next are a segment of the route. The log of the first of them
    is complete, unless `is_log_whole` says otherwise; the others were sent nothing from here.
    While others are being brought to its state, `tails` hold what was sent to it since.
    `answered_at`, of the last of a segment, is in seconds of the client's clock.
    """

    hop: Hop
    link: HopLink | None
    log: RecoveryLog[Tensor]
    feeds: bool = False
    is_log_whole: bool = True
    capability: Capability = NO_CAPABILITY
    next: NextHop | None = None
    tails: list[list[Question]] = field(default_factory=list)
    answered_at: float = -math.inf


@dataclass(frozen=True)
class Waiting:
    """A session waits for room at a peer, which expects that to take `seconds`."""

    hop: Hop
    seconds: float

    def __str__(self) -> str:
        return f"room at peer …{self.hop.peer.peer_id[-6:]}, about {self.seconds:.0f} s"


class RouteOpener:
    """Opens routes for one session and settles what all of its hops have in common.

    `epoch` counts the routes, `wire_dtype` is None before the first one.
    """

    def __init__(
        self,
        facts: SessionFacts,
        swarm: Swarm,
        transport: Transport,
        clock: Clock,
        config: ClientConfig,
    ) -> None:
        self._facts = facts
        self._swarm = swarm
        self._transport = transport
        self._clock = clock
        self._config = config
        self.epoch = 0
        self.wire_dtype: WireDtype | None = None
        self.forgiven: set[PeerId] = set()
        self.waiting: Waiting | None = None  # for whoever watches
        self.recorder: Recorder | None = None
        self.prompts_LBPH: Tensor | None = None
        self.mailbox = Mailbox()
        self.on_leaving: Callable[[], None] = _do_nothing
        self._num_twins = 0

    def make_twin(self) -> RouteOpener:
        """Return an opener of other sessions, with other secrets, for hops to be used here later.

        It counts epochs of its own, from that of now on.
        """
        self._num_twins += 1
        secret = self._derive(f"twin {self._num_twins}", self._facts.span, SESSION_ID_BYTES)
        facts = replace(self._facts, session=SessionId(secret))
        twin = RouteOpener(facts, self._swarm, self._transport, self._clock, self._config)
        twin.prompts_LBPH = self.prompts_LBPH
        twin.epoch, twin.wire_dtype, twin.on_leaving = self.epoch, self.wire_dtype, self.on_leaving
        return twin

    def begin(self, route: Route) -> None:
        """Count a route; the first one settles the dtype, which replacements have to speak."""
        self.epoch += 1
        if self.wire_dtype is None:
            self.wire_dtype = self._choose_wire_dtype([hop.peer for hop in route.hops])

    def _choose_wire_dtype(self, peers: Sequence[Announcement]) -> WireDtype:
        wanted = self._config.wire_dtype
        knows_int8 = all(peer.max_version >= INT8_VERSION for peer in peers)
        if wanted != "auto" and (wanted != "int8" or knows_int8):
            return WireDtype[wanted.upper()]
        is_exact = all(peer.weights == "fp32" for peer in peers)
        return WireDtype.FP32 if is_exact else WireDtype.BF16

    def count_bytes(self, num_tokens: int) -> int:
        """Return how many bytes the hidden states of so many tokens are on the wire."""
        assert self.wire_dtype is not None
        return compute_num_bytes(self.wire_dtype, 1, num_tokens, self._facts.hidden_size)

    def begin_fork(self, parent: RouteOpener) -> None:
        """Count the route of another session as the first one of this, with its dtype."""
        self.epoch += 1
        self.wire_dtype = parent.wire_dtype

    def name_session(self, span: Span) -> SessionId:
        """Return the id of a session that is opened now; it tells nothing of the others."""
        return SessionId(self._derive("session", span, SESSION_ID_BYTES))

    def make_capability(self, span: Span) -> Capability:
        """Return what lets a hop be pushed to that is opened, or admits another one, now."""
        return Capability(self._derive("capability", span, CAPABILITY_BYTES))

    def _derive(self, purpose: str, span: Span, num_bytes: int) -> bytes:
        text = f"{purpose}/{self.epoch}/{span}".encode()
        return hashlib.blake2b(text, key=self._facts.session, digest_size=num_bytes).digest()

    async def open(
        self, hops: Sequence[LiveHop], num_rows: int, deadline: float, max_wait_seconds: float
    ) -> None:
        """Open the links of hops; some are open even when it raises what the first failure was."""
        results = await asyncio.gather(
            *(self.open_link(live, num_rows, deadline, max_wait_seconds) for live in hops),
            return_exceptions=True,
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def open_link(
        self,
        live: LiveHop,
        num_rows: int,
        deadline: float,
        max_wait_seconds: float = 0.0,
        parent: SessionId | None = None,
        prefix_tokens: int = 0,
    ) -> None:
        """Open the session of one hop, under an id of its own; LostHopError if that fails.

        With a `parent`, it begins with the first `prefix_tokens` tokens of that one.
        """
        recording = nullcontext() if self.recorder is None else self.recorder.opening(live.hop)
        with recording:
            await self._open_link(live, num_rows, deadline, max_wait_seconds, parent, prefix_tokens)

    async def _open_link(
        self,
        live: LiveHop,
        num_rows: int,
        deadline: float,
        max_wait_seconds: float,
        parent: SessionId | None,
        prefix_tokens: int,
    ) -> None:
        hop, adapter = live.hop, self._facts.adapter
        self._check_version(hop)
        opening = await self._make_opening(live, num_rows, max_wait_seconds, parent, prefix_tokens)
        pieces = self._encode_prompts(opening)

        def note_queued(seconds: float) -> None:
            self.waiting = Waiting(hop, seconds)
            _logger.info("waiting for %s", self.waiting)

        timeout_seconds = self._choose_timeout_seconds(hop, deadline, max_wait_seconds == 0)
        try:
            if adapter is not None:
                await adapter.bring(hop)
            with self._swarm.book.bandwidth.carry(_count_bytes(pieces)) as carrying_seconds:
                live.link, facts = await HopLink.open(
                    self._transport,
                    self._clock,
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
            raise self._swarm.book.blame(hop, error, self.forgiven) from error
        finally:
            if self.waiting is not None and self.waiting.hop is hop:
                self.waiting = None  # not that of another hop
        live.link.on_leaving = self.on_leaving
        live.link.listen(self.mailbox if live.capability else None)
        self._swarm.book.note_rtt(hop.peer.peer_id, facts.rtt_seconds)

    async def _make_opening(
        self,
        live: LiveHop,
        num_rows: int,
        max_wait_seconds: float,
        parent: SessionId | None,
        prefix_tokens: int,
    ) -> Open:
        assert self.wire_dtype is not None
        span, adapter, prompts = live.hop.span, self._facts.adapter, self.prompts_LBPH
        prompt_rows, prompt_tokens = (0, 0) if prompts is None else prompts.shape[1:3]
        # First: the epoch may be another one afterwards.
        adapter_id = NO_ADAPTER if adapter is None else await adapter.name_for(span)
        return Open(
            self.name_session(span),
            self.epoch,
            self._facts.model_id,
            span,
            num_rows,
            self._facts.max_tokens,
            self.wire_dtype,
            max_wait_seconds,
            self._facts.kv_format,
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
        if self.wire_dtype is WireDtype.INT8 and hop.peer.max_version < INT8_VERSION:
            raise LostHopError(hop, "its version is too old for hidden states in int8")
        if self.prompts_LBPH is not None and hop.peer.max_version < PASS_VERSION:
            raise LostHopError(hop, "its version is too old for deep prompts")

    def _encode_prompts(self, opening: Open) -> list[PassPiece]:
        if self.prompts_LBPH is None:
            return []
        start, span = self._facts.span.start, opening.span
        prompts_LBPH = self.prompts_LBPH[span.start - start : span.stop - start]
        # Rounded to 8 bits they would be others than those that were trained.
        dtype = WireDtype.BF16 if opening.dtype is WireDtype.INT8 else opening.dtype
        return encode_prompts(opening.session, prompts_LBPH, dtype)

    def _choose_timeout_seconds(self, hop: Hop, deadline: float, is_first_look: bool) -> float:
        longest_seconds = self._config.connect_timeout_seconds
        if is_first_look and not self._swarm.book.times(hop.peer.peer_id).has_answered:
            longest_seconds *= _FIRST_LOOK_FRACTION
        return choose_open_timeout_seconds(
            hop.peer.queue_seconds,
            invert(hop.peer.prefill_tokens_per_second),
            min(longest_seconds, max(deadline - self._clock.now(), _SHORT_SECONDS)),
        )

    def _name_for(self, hop: Hop) -> ClientToken:
        secret = self._facts.client_secret
        return make_client_token(secret, hop.peer.peer_id) if secret else NO_CLIENT


def _count_bytes(pieces: Sequence[PassPiece]) -> int:
    return sum(len(piece.tensor.data) for piece in pieces)


def _do_nothing() -> None:
    """Be told of a peer that leaves while nobody minds."""


def invert(speed: float | None) -> float | None:
    return 1.0 / speed if speed else None
