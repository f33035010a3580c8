"""The composition root of a client: join a swarm, open sessions over it, leave."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from transformers import PreTrainedConfig

from ...protocol.ids import ModelId
from ...protocol.net.clock import Clock, SystemClock
from ...protocol.net.network import Network
from ...protocol.records.swarm_view import SwarmView
from ...protocol.spans import Span
from ..adapters.adapter_versions import SentAdapter
from ..concurrency.portal import Portal
from ..passes.pass_asking import PassAsker
from ..publishing.publisher import Publisher
from ..session.inference_session import InferenceSession
from ..settings.config import ClientConfig
from ..training.autograd import PassRunner
from ..training.remote_passes import RemotePasses
from .joining import Connect, Joined, SwarmModel, find_network, join_swarm
from .session_opener import SessionOpener


class Client:
    """A member of one model's swarm that does not serve. Close it, or use it in a `with` block.

    Its asynchronous parts run on an event loop of its own, so that plain scripts can use it.
    """

    def __init__(
        self,
        config: ClientConfig,
        model: SwarmModel,
        joined: Joined,
        clock: Clock,
        portal: Portal,
    ) -> None:
        """Made by `join`."""
        self._portal = portal
        self._joined = joined
        self.swarm = swarm = joined.swarm
        self._hidden_size = model.hidden_size
        self.config = config
        secret = secrets.token_bytes(16)
        self._asker = PassAsker(swarm.book, joined.transport, config, secret)
        self._sessions = SessionOpener(swarm, joined.transport, clock, config, secret)
        publisher = Publisher(self._asker, clock)
        self._passes = RemotePasses(self._asker, publisher)
        self.passes = PassRunner(self._passes, portal)
        portal.run_last(self._leave)

    def __repr__(self) -> str:
        return f"<Client of {self.swarm!r}>"

    @classmethod
    def join(
        cls, config: ClientConfig, network: Network, clock: Clock, model: SwarmModel
    ) -> Client:
        """Join the swarm of a model over a network; return when its directory was read once.

        Raises DirectoryError if no initial peer answers at the second attempt.
        """
        portal = Portal()

        async def join_on_loop() -> Client:
            joined = await join_swarm(config, network, clock, model)
            return cls(config, model, joined, clock, portal)

        try:
            return portal.run(join_on_loop())
        except BaseException:
            portal.close()
            raise

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exception: object) -> None:
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
    def is_closed(self) -> bool:
        """Whether the client has left the swarm."""
        return self._portal.is_closed

    @property
    def view(self) -> SwarmView:
        """The newest known announcements; sends no request."""
        return self.swarm.book.view

    def view_swarm(self) -> SwarmView:
        """Read the directory and return all valid announcements of the model."""
        return self._portal.run(self.swarm.book.refresh())

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
        finally:
            await self._joined.leave()


def make_join(
    connect: Connect = find_network,
) -> Callable[[ModelId, PreTrainedConfig, ClientConfig], Client]:
    """Return a function that joins the swarm of a model over the network of `connect`."""

    def join(model_id: ModelId, model: PreTrainedConfig, config: ClientConfig) -> Client:
        known = SwarmModel(model_id, model.num_hidden_layers, model.hidden_size)
        return Client.join(config, connect(config), SystemClock(), known)

    return join
