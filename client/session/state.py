"""The state that all parts of one session share: its settings, epoch, numbers and secrets."""

from __future__ import annotations

import hashlib
import random
import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import Tensor

from ...protocol.errors import RouteError, ShoalError
from ...protocol.ids import (
    CAPABILITY_BYTES,
    SESSION_ID_BYTES,
    AdapterId,
    Capability,
    ModelId,
    PeerId,
    SessionId,
)
from ...protocol.limits import MAX_CONTROL_BYTES, MAX_FRAME_BYTES
from ...protocol.net.clock import Clock
from ...protocol.net.transport import Transport
from ...protocol.records.announcements import Announcement
from ...protocol.spans import Span
from ...protocol.tensors import KVFormat, WireDtype, compute_num_bytes
from ...protocol.versions import INT8_VERSION
from ..concurrency.tasks import Background
from ..routing.peer_book import PeerBook
from ..routing.route import Ends, Hop, Route
from ..settings.client_config import ClientConfig
from ..trace.trace import Recorder

_FLOAT_TOKENS = {KVFormat.FLOAT: 1.0, KVFormat.INT8: 0.5}
"""Tokens of floats that a token takes the room of. Half is true where peers compute in 16 bits."""

_MAX_PIECE_TOKENS = 2048


class SharedAdapter(Protocol):
    """One adapter for all rows, which each hop has to have before it is opened; see
    `SessionAdapter`.
    """

    @property
    def is_published(self) -> bool: ...
    async def name_for(self, span: Span) -> AdapterId: ...
    async def bring(self, hop: Hop) -> None: ...
    def note_failure(self, hop: Hop, error: ShoalError) -> None: ...


class Routes(Protocol):
    """The interface of a session to a swarm; see `RouteFinder`."""

    book: PeerBook

    async def wait_for_route(
        self,
        span: Span,
        deadline: float,
        max_age_seconds: float,
        weights: Collection[str | None],
        exclude: Collection[PeerId] = (),
        needed_kv_tokens: float = 0.0,
        ends: Ends | None = None,
        may_wait: Callable[[], bool] = ...,
    ) -> Route: ...
    def find_gaps(self, span: Span, weights: Collection[str | None]) -> RouteError | None: ...
    async def survey(self) -> None: ...
    def expect_way_seconds(self, hops: Sequence[Hop]) -> list[float]: ...


@dataclass(frozen=True)
class SessionFacts:
    """The settings with which a session is opened.

    `session` never leaves the client: the id at each hop is derived from it. So no peer can step
    the session at another peer, and one that serves two spans of a route holds two sessions.
    """

    model_id: ModelId
    span: Span
    hidden_size: int
    max_tokens: int
    client_secret: bytes = b""
    """The secret from which the client's name at each peer is derived; empty: it has none."""
    kv_format: KVFormat = KVFormat.FLOAT
    adapter: SharedAdapter | None = None
    session: SessionId = field(
        default_factory=lambda: SessionId(secrets.token_bytes(SESSION_ID_BYTES))
    )

    def count_kv_tokens(self, num_rows: int) -> float:
        """Return how much room so many rows may need, in the tokens that announcements count."""
        return num_rows * self.max_tokens * _FLOAT_TOKENS[self.kv_format]


@dataclass
class StepProgress:
    """A step is under way: how many of its tokens per row are through all blocks."""

    num_tokens: int
    num_done: int = 0


@dataclass(frozen=True)
class Waiting:
    """A session waits for room at a peer, which expects that to take `seconds`."""

    hop: Hop
    seconds: float

    @property
    def place(self) -> str:
        """What is waited for, in words that stay the same while the estimate changes."""
        return f"room at peer …{self.hop.peer.peer_id[-6:]}"

    def __str__(self) -> str:
        return f"{self.place}, about {self.seconds:.0f} s"


class SessionContext:
    """The part of a session that its parts read and few of them change.

    `epoch` counts the routes, `wire_dtype` is None before the first one. Peers of `forgiven` have
    lost the session once, which was not their fault.
    """

    def __init__(
        self,
        facts: SessionFacts,
        swarm: Routes,
        transport: Transport,
        clock: Clock,
        config: ClientConfig,
        background: Background,
    ) -> None:
        self.facts = facts
        self.swarm = swarm
        self.book = swarm.book
        self.transport = transport
        self.clock = clock
        self.config = config
        self.background = background
        self.rng = random.Random(config.seed)
        self.epoch = 0
        self.num_rows = 0
        self.last_sequence = 0
        """Number of the newest step, whether it was taken or failed."""
        self.wire_dtype: WireDtype | None = None
        self.forgiven: set[PeerId] = set()
        self.prompts_LBPH: Tensor | None = None
        """Deep prompts for the first P positions of the inputs of blocks; set before the hops."""
        self.waiting: Waiting | None = None
        """The peer that has no room for the session yet, and how long it expects that to last."""
        self.sought: Span | None = None
        """The blocks that were lost and that no peer has taken over yet."""
        self.progress: StepProgress | None = None
        """How far the step under way is, if one is."""
        self.recorder: Recorder | None = None
        self.on_leaving: Callable[[], None] = lambda: None
        """Called when the peer of a hop says that it will stop soon."""
        self._num_standbys = 0

    def make_standby_context(self) -> SessionContext:
        """Return the state of a standby: another session, with other secrets, for hops of this one.

        It counts epochs of its own, from that of now on, and is not recorded.
        """
        self._num_standbys += 1
        secret = self._derive(f"standby {self._num_standbys}", self.facts.span, SESSION_ID_BYTES)
        facts = replace(self.facts, session=SessionId(secret))
        context = SessionContext(
            facts, self.swarm, self.transport, self.clock, self.config, self.background
        )
        context.epoch, context.num_rows = self.epoch, self.num_rows
        context.wire_dtype = self.wire_dtype
        context.prompts_LBPH, context.on_leaving = self.prompts_LBPH, self.on_leaving
        return context

    def begin(self, route: Route) -> None:
        """Count a route; the first one settles the dtype, which replacements have to speak."""
        self.epoch += 1
        if self.wire_dtype is None:
            self.wire_dtype = self._choose_wire_dtype([hop.peer for hop in route.hops])

    def begin_fork(self, parent: SessionContext) -> None:
        """Count the route of another session as the first one of this."""
        self.epoch += 1
        self.wire_dtype, self.num_rows = parent.wire_dtype, parent.num_rows
        self.last_sequence = parent.last_sequence

    def _choose_wire_dtype(self, peers: Sequence[Announcement]) -> WireDtype:
        wanted = self.config.wire_dtype
        knows_int8 = all(peer.max_version >= INT8_VERSION for peer in peers)
        if wanted != "auto" and (wanted != "int8" or knows_int8):
            return WireDtype[wanted.upper()]
        is_exact = all(peer.weights == "fp32" for peer in peers)
        return WireDtype.FP32 if is_exact else WireDtype.BF16

    def name_session(self, span: Span) -> SessionId:
        """Return the id of a session that is opened now; it tells nothing of the others."""
        return SessionId(self._derive("session", span, SESSION_ID_BYTES))

    def make_capability(self, span: Span) -> Capability:
        """Return what lets a hop be pushed to that is opened, or admits another one, now."""
        return Capability(self._derive("capability", span, CAPABILITY_BYTES))

    def _derive(self, purpose: str, span: Span, num_bytes: int) -> bytes:
        text = f"{purpose}/{self.epoch}/{span}".encode()
        return hashlib.blake2b(text, key=self.facts.session, digest_size=num_bytes).digest()

    def count_bytes(self, num_tokens: int) -> int:
        """Return how many bytes the hidden states of so many tokens are on the wire."""
        assert self.wire_dtype is not None
        return compute_num_bytes(self.wire_dtype, 1, num_tokens, self.facts.hidden_size)

    @property
    def max_piece_tokens(self) -> int:
        """How many tokens per row one frame should carry."""
        dtype = self.wire_dtype or WireDtype.FP32
        token_bytes = compute_num_bytes(dtype, self.num_rows, 1, self.facts.hidden_size)
        piece_bytes = min(self.config.max_step_bytes, MAX_FRAME_BYTES - MAX_CONTROL_BYTES)
        return max(1, min(piece_bytes // token_bytes, _MAX_PIECE_TOKENS))

    def make_deadline(self) -> float:
        """Return until when lost hops may be replaced, from now."""
        return self.clock.now() + self.config.failover_timeout_seconds

    def rtt_seconds(self, hop: Hop) -> float:
        """Return the round trip to the peer of a hop, as last measured."""
        return self.book.rtt_seconds(hop.peer.peer_id) or 0.0
