"""The sessions of one peer, and the streams that it serves: one `Conversation` each."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

from ...protocol import limits
from ...protocol.ids import ModelId, PeerId, SessionId
from ...protocol.messages.offers import Offer
from ...protocol.net.clock import Clock
from ...protocol.net.transport import Stream
from ..accounts.adapter_budget import MOST_BYTES as MOST_ADAPTER_BYTES
from ..accounts.adapter_shelf import AdapterShelf
from ..accounts.memory import read_free_bytes
from ..accounts.pass_budget import MOST_BYTES, PassBudget
from ..accounts.shared_bytes import SharedBytes
from ..engine.compute_thread import ComputeThread
from ..engine.engine import Engine
from ..pushing.neighbours import Neighbours
from ..pushing.outlet import Ways
from ..pushing.parked_streams import ParkedStreams
from ..sessions.admission import Admission
from ..sessions.held_session import HeldSession
from .conversation import Conversation

MAX_PENDING_BYTES = 32 * limits.MAX_FRAME_BYTES
"""Frames of all streams that arrive in pieces, steps that wait for the engine, and answers that
wait for their reader."""

MAX_LOGGED_BYTES = 256 * 2**20
"""Outputs of all sessions that were pushed to other peers and may have to be pushed again: 32,000
tokens of a model of width 4096 in 16 bits. A session that finds no room is not logged."""


MAX_BYTES_OF_PROMPTS = 2**28
"""Deep prompts of all sessions."""


@dataclass(frozen=True)
class ServiceFacts:
    """What a service says of itself and checks requests against."""

    peer_id: PeerId
    model_id: ModelId
    max_sessions: int
    session_idle_seconds: float
    pass_bytes: int = MOST_BYTES
    """Memory for passes; 0: none are taken."""
    adapter_bytes: int = MOST_ADAPTER_BYTES
    """Memory for adapters that clients bring; 0: none are kept."""


@dataclass
class Service:
    """All sessions of one peer, and the code that serves a stream."""

    facts: ServiceFacts
    engine: Engine
    compute: ComputeThread
    clock: Clock
    neighbours: Neighbours | None = None
    is_draining: bool = False
    has_hung_up: bool = False
    read_free_bytes: Callable[[], int] = read_free_bytes
    pending: SharedBytes = field(default_factory=lambda: SharedBytes(MAX_PENDING_BYTES))
    prompts: SharedBytes = field(default_factory=lambda: SharedBytes(MAX_BYTES_OF_PROMPTS, 3))
    num_passes: int = 0
    """Passes that come in, wait, are computed or answered."""
    passes: SharedBytes = field(init=False)
    sessions: dict[SessionId, HeldSession] = field(default_factory=dict)
    streams: set[Conversation] = field(default_factory=set)
    pass_budget: PassBudget = field(init=False)
    admission: Admission = field(init=False)
    ways: Ways = field(init=False)
    adapters: AdapterShelf = field(init=False)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.pass_budget = PassBudget(self.facts.pass_bytes)
        self.engine.passes.activations.limit(self.pass_budget.kept_bytes)
        self.compute.limit_passes(self.pass_budget.work_bytes)
        self.passes = SharedBytes(self.pass_budget.tensor_bytes, times_free=3)
        self.admission = Admission(self)
        self.adapters = AdapterShelf(self.clock, self.facts.adapter_bytes)
        logged = SharedBytes(MAX_LOGGED_BYTES, times_free=3)
        self.ways = Ways(self.neighbours, self.pending, logged)

    @property
    def parked(self) -> ParkedStreams | None:
        """Who keeps the streams that are offered; None where none are taken."""
        return None if self.neighbours is None else self.neighbours.parked

    async def serve(self, stream: Stream) -> Offer | None:
        """Serve one stream until it ends; frees everything that the stream opened.

        Returns the offer where it did not end, but was offered: nobody serves it any more.
        """
        conversation = Conversation(self, stream)
        try:
            await conversation.run()
        finally:
            self.streams.discard(conversation)
            self.note_change()
        return conversation.offer

    def list_stream_addresses(self) -> list[str]:
        """Return from where each stream comes that is served now."""
        return [stream.holder.address for stream in self.streams]

    def begin_draining(self) -> None:
        """Take nothing new; who waits for a session, or has one, hears that at once."""
        self.is_draining = True
        self.admission.look_again()
        for stream in self.streams:
            stream.say_leaving()

    async def hang_up(self) -> None:
        """End all streams, and what is left of sessions with them; nothing is served any more."""
        self.has_hung_up = True
        self.begin_draining()
        while self.streams:
            for conversation in list(self.streams):
                await conversation.hang_up()
            self._changed.clear()
            if self.streams:
                await self._changed.wait()
        self.adapters.close()

    async def wait_until_empty(self, timeout_seconds: float) -> bool:
        """Wait until no session is left, being opened or waiting, and no pass; return whether that
        came in time.

        With those that wait the end only comes once they have had their turn, unless it drains.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                while not self.is_empty:
                    self._changed.clear()
                    await self._changed.wait()
        return self.is_empty

    def note_change(self) -> None:
        """Note that a session was closed, or is no longer being opened, or does not wait now; or
        that a pass is over.
        """
        self._changed.set()

    @property
    def is_empty(self) -> bool:
        """Whether no session is held, being opened or waiting, and no pass is there."""
        admission = self.admission
        has_sessions = self.sessions or admission.num_opening or admission.num_waiting
        return not has_sessions and not self.num_passes

    def close_session(self, session: SessionId, held: HeldSession) -> None:
        """Drop what a session still waits for and free its cache, unless that was done.

        Another session may have its id by now: that one stays.
        """
        if self.sessions.get(session) is not held:
            return
        del self.sessions[session]
        held.outlet.close()
        if held.adapter is not None:
            self.adapters.leave(held.adapter, held.holder)
        self.prompts.count(held.holder, -held.num_prompt_bytes)
        for future in held.running:
            future.cancel()
        closing = self.compute.call(held.cache.close)
        closing.add_done_callback(lambda _: self.admission.note_closed(held))
        self.note_change()
