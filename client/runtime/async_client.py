"""The composition root of a client: join a swarm, open sessions and send passes over it, leave."""

from __future__ import annotations

import secrets
from contextlib import suppress
from typing import Self

from ...protocol.errors import DirectoryError
from ...protocol.net.clock import Clock
from ...protocol.net.directory import Directory
from ...protocol.net.network import Network
from ...protocol.net.transport import Transport
from ...protocol.spans import Span
from ..adapters.adapter_versions import SentAdapter
from ..concurrency.tasks import Background
from ..passes.pass_asking import PassAsker, SessionAdapter
from ..routing.route_finder import RouteFinder, SwarmModel
from ..session.replacements import Replacements
from ..session.session import RemoteSession
from ..session.state import SessionContext, SessionFacts
from ..settings.client_config import ClientConfig, read_kv_format, read_max_length
from ..training.remote_passes import RemotePasses


class AsyncClient:
    """A member of one model's swarm that does not serve, with everything that it opens.

    Owned by one event loop; `Client` offers it to plain scripts.
    """

    def __init__(
        self,
        config: ClientConfig,
        model: SwarmModel,
        transport: Transport,
        directory: Directory,
        clock: Clock,
    ) -> None:
        """Take over a transport and a directory, both closed with the client; see `join`."""
        self.swarm = RouteFinder(directory, transport, model, clock, config)
        self._config = config
        self._model = model
        self._transport = transport
        self._clock = clock
        self._secret = secrets.token_bytes(16)
        self._background = Background()
        self._lasting = Background()
        self._asker = PassAsker(self.swarm.book, transport, config, self._secret)
        self.passes = RemotePasses(self._asker)

    def __repr__(self) -> str:
        return f"<AsyncClient of {self.swarm!r}>"

    @classmethod
    async def join(
        cls, config: ClientConfig, network: Network, clock: Clock, model: SwarmModel
    ) -> Self:
        """Join the swarm of a model over a network; return when its directory was read once.

        Raises DirectoryError if no initial peer answers at the second attempt.
        """
        with suppress(DirectoryError):
            return await cls._join_once(config, network, clock, model)
        # A busy machine may have been too slow, above all where many join at once.
        return await cls._join_once(config, network, clock, model)

    @classmethod
    async def _join_once(
        cls, config: ClientConfig, network: Network, clock: Clock, model: SwarmModel
    ) -> Self:
        transport, directory = await network.connect()
        client = cls(config, model, transport, directory, clock)
        try:
            await client.swarm.book.refresh()
            client._lasting.start(client.swarm.keep_acquainted())
        except BaseException:
            await client.close()
            raise
        return client

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    def open_session(
        self,
        max_length: int,
        span: Span,
        kv_format: str | None = None,
        adapter: SentAdapter | None = None,
    ) -> RemoteSession:
        """Return a session over some blocks; its route is chosen with the first step.

        `kv_format` applies to all of its hops; None: the client's. All rows use the `adapter`.
        Raises UsageError for a length or a format that no session may have.
        """
        facts = SessionFacts(
            self._model.model_id,
            span,
            self._model.hidden_size,
            read_max_length(max_length),
            self._secret,
            read_kv_format(self._config.kv_format if kv_format is None else kv_format),
            None if adapter is None else SessionAdapter(adapter, self._asker),
        )
        return self.open_session_as(facts)

    def open_session_as(
        self, facts: SessionFacts, kind: type[RemoteSession] = RemoteSession
    ) -> RemoteSession:
        """Return a session with everything that works beside its steps."""
        state = SessionContext(
            facts, self.swarm, self._transport, self._clock, self._config, self._background
        )
        return kind(state, Replacements)

    async def close_sessions(self) -> None:
        """Wait until every peer was told which sessions are over."""
        await self._background.finish()

    async def close(self) -> None:
        """Tell peers what is over, withdraw published adapters, and break all connections."""
        try:
            await self._lasting.cancel()
            await self.close_sessions()
            await self.passes.close()
        finally:
            try:
                await self._transport.close()
            finally:
                await self.swarm.close()
