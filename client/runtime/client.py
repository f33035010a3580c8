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
from ..routing.router import Route
from ..routing.swarm import Swarm
from ..session.inference_session import InferenceSession
from ..settings.config import ClientConfig
from ..training.autograd import PassRunner
from ..training.remote_passes import RemotePasses
from .joining import Connect, Connected, SwarmModel, join_swarm
from .session_opener import SessionOpener


class Client:
    """A member of one model's swarm that only uses it. Close it, or use it in a `with` block.

    Everything asynchronous lives on a loop of its own, so that a client serves plain scripts.
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
        self._asker = PassAsker(swarm, self._transport, clock, config, secret)
        self._sessions = SessionOpener(swarm, self._transport, clock, config, secret)
        self._passes = RemotePasses(self._asker, clock)
        self.passes = PassRunner(self._passes, portal)
        portal.run_last(self._leave)

    def __repr__(self) -> str:
        return f"<Client of {self._swarm!r}>"

    @classmethod
    def join(
        cls, config: ClientConfig, connect: Connect, clock: Clock, model: SwarmModel
    ) -> Client:
        """Join a swarm over the network of `connect`; return when its directory was read once.

        Raises DirectoryError when no initial peer answers, the second time either.
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

        `kv_format` is that of all of its hops; None: the client's. All rows have the `adapter`.
        """
        open_remote = self._sessions.prepare(
            max_length, span, self._hidden_size, kv_format, adapter, self._asker
        )
        return InferenceSession(open_remote, self._portal)

    @property
    def config(self) -> ClientConfig:
        """The settings that it joined with."""
        return self._config

    @property
    def is_closed(self) -> bool:
        """Whether it has left the swarm."""
        return self._portal.is_closed

    @property
    def view(self) -> SwarmView:
        """Who serves what, as far as was heard last; asks nobody."""
        return self._swarm.view

    @property
    def avoided_peers(self) -> frozenset[PeerId]:
        """Peers that failed and are not used for a while unless there is nobody else."""
        return self._swarm.avoided

    @property
    def missing_blocks(self) -> tuple[Span, ...]:
        """The blocks that nobody serves, as far as was heard last; asks nobody."""
        return self._swarm.view.gaps

    def plan_route(self, span: Span, needed_kv_tokens: float = 0.0) -> Route:
        """Read the directory and return a route that a session might take now.

        Others with room for `needed_kv_tokens` tokens of all rows are preferred. Raises RouteError
        with the blocks that nobody serves.
        """
        return self._portal.run(
            self._swarm.wait_for_route(
                span, float("-inf"), 0.0, (self._config.weights,), needed_kv_tokens=needed_kv_tokens
            )
        )

    def view_swarm(self) -> SwarmView:
        """Read the directory and return who serves what."""
        return self._portal.run(self._swarm.refresh())

    def close(self) -> None:
        """Hang up on everybody and end the client's thread; safe to call twice.

        What other threads still wait for ends with UsageError. A client that nobody closes is
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
