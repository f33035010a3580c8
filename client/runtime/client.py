"""The composition root of a client: join a swarm, open sessions over it, leave."""

from __future__ import annotations

import secrets
from types import TracebackType

from ...protocol.ids import PeerId
from ...protocol.net.clock import Clock
from ...protocol.records.swarm_view import SwarmView
from ...protocol.spans import Span
from ..adapters.adapter_versions import SentAdapter
from ..concurrency.portal import Portal
from ..passes.pass_asking import PassAsker
from ..publishing.publisher import Publisher
from ..routing.route import Route
from ..routing.swarm import Swarm
from ..session.inference_session import InferenceSession
from ..settings.config import ClientConfig
from ..training.autograd import PassRunner
from ..training.remote_passes import RemotePasses
from .joining import Connect, Connected, SwarmModel, join_swarm
from .session_opener import SessionOpener


class Client:
    """A member of one model's swarm that does not serve. Close it, or use it in a `with` block.

    Its asynchronous parts run on an event loop of its own, so that plain scripts can use it.
    """

    def __init__(
        self,
        config: ClientConfig,
        model: SwarmModel,
        swarm: Swarm,
        connected: Connected,
        clock: Clock,
        portal: Portal,
    ) -> None:
        """Made by `join`."""
        self._portal = portal
        self._swarm = swarm
        self._transport, self._directory = connected
        self._hidden_size = model.hidden_size
        self._config = config
        secret = secrets.token_bytes(16)
        self._asker = PassAsker(swarm.book, self._transport, clock, config, secret)
        self._sessions = SessionOpener(swarm, self._transport, clock, config, secret)
        publisher = Publisher(self._asker, clock)
        self._passes = RemotePasses(self._asker, publisher)
        self.passes = PassRunner(self._passes, portal)
        portal.run_last(self._leave)

    def __repr__(self) -> str:
        return f"<Client of {self._swarm!r}>"

    @classmethod
    def join(
        cls, config: ClientConfig, connect: Connect, clock: Clock, model: SwarmModel
    ) -> Client:
        """Join a swarm over the network of `connect`; return when its directory was read once.

        Raises DirectoryError if no initial peer answers at the second attempt.
        """
        portal = Portal()

        async def join_on_loop() -> Client:
            swarm, connected = await join_swarm(config, connect, clock, model)
            return cls(config, model, swarm, connected, clock, portal)

        try:
            return portal.run(join_on_loop())
        except BaseException:
            portal.close()
            raise

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def open_session(
        self,
        max_length: int,
        span: Span,
        kv_format: str | None = None,
        adapter: SentAdapter | None = None,
    ) -> InferenceSession:
        """Return a session over some blocks; its route is chosen with the first step.

        `kv_format` applies to all of its hops; None: the client's. All rows use the `adapter`.
        """
        open_remote = self._sessions.prepare(
            max_length, span, self._hidden_size, kv_format, adapter, self._asker
        )
        return InferenceSession(open_remote, self._portal)

    @property
    def config(self) -> ClientConfig:
        """The settings that the client joined with."""
        return self._config

    @property
    def is_closed(self) -> bool:
        """Whether the client has left the swarm."""
        return self._portal.is_closed

    @property
    def view(self) -> SwarmView:
        """The newest known announcements; sends no request."""
        return self._swarm.book.view

    @property
    def avoided_peers(self) -> frozenset[PeerId]:
        """Peers in quarantine after a failure; they are used only if there are no others."""
        return self._swarm.book.avoided

    @property
    def missing_blocks(self) -> tuple[Span, ...]:
        """The blocks that no peer serves, by the newest known announcements; sends no request."""
        return self._swarm.book.view.gaps

    def plan_route(self, span: Span, needed_kv_tokens: float = 0.0) -> Route:
        """Read the directory and return a route that a session might take now.

        Prefers peers with room for `needed_kv_tokens` tokens of all rows. Raises RouteError that
        names the blocks which no peer serves.
        """
        return self._portal.run(
            self._swarm.wait_for_route(
                span, float("-inf"), 0.0, (self._config.weights,), needed_kv_tokens=needed_kv_tokens
            )
        )

    def view_swarm(self) -> SwarmView:
        """Read the directory and return all valid announcements of the model."""
        return self._portal.run(self._swarm.book.refresh())

    def close(self) -> None:
        """Close all streams and end the client's thread; safe to call twice.

        Calls that other threads are waiting for raise UsageError. A client that is not closed is
        closed when the interpreter exits.
        """
        self._portal.close()

    async def _leave(self) -> None:
        try:
            await self._sessions.close()
            await self._passes.close()
            await self._transport.close()
        finally:
            await self._directory.close()
