"""The client of plain scripts, which know nothing of event loops."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from transformers import PreTrainedConfig

from ...protocol.errors import DirectoryError, UsageError
from ...protocol.ids import ModelId
from ...protocol.net.clock import Clock, SystemClock
from ...protocol.net.dht.internet import InternetNetwork
from ...protocol.net.dht.known_addresses import load_swarm
from ...protocol.net.network import Network
from ...protocol.records.swarm_view import SwarmView
from ...protocol.spans import Span
from ..adapters.adapter_versions import SentAdapter
from ..concurrency.portal import Portal
from ..routing.route_finder import SwarmModel
from ..session.inference_session import InferenceSession, OpenRemote
from ..settings.client_config import ClientConfig
from ..training.autograd import PassRunner
from .async_client import AsyncClient

Connect = Callable[[ClientConfig], Network]
"""Returns the network over which a client with these settings joins."""


class Client:
    """A member of one model's swarm that does not serve. Close it, or use it in a `with` block.

    An `AsyncClient` on a thread and an event loop of its own.
    """

    def __init__(self, config: ClientConfig, client: AsyncClient, portal: Portal) -> None:
        """Made by `join`."""
        self.config = config
        self.swarm = client.swarm
        self.portal = portal
        """Runs coroutines on the client's loop."""
        self.passes = PassRunner(client.passes, portal)
        self._client = client
        portal.run_at_close(client.close)

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
            # Here, so that an interrupt leaves nothing open: the portal closes what has joined.
            return cls(config, await AsyncClient.join(config, network, clock, model), portal)

        try:
            return portal.run(join_on_loop())
        except DirectoryError as error:
            portal.close()
            # Dozens of lines of event loops would hide what it says.
            raise error.with_traceback(None) from error.__cause__
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
        opener = self.make_opener(max_length, span, kv_format, adapter)
        return InferenceSession.over(opener, self.portal)

    def make_opener(
        self, max_length: int, span: Span, kv_format: str | None, adapter: SentAdapter | None
    ) -> OpenRemote:
        """Return what opens such a session."""
        return partial(self._client.open_session, max_length, span, kv_format, adapter)

    @property
    def is_closed(self) -> bool:
        """Whether the client has left the swarm."""
        return self.portal.is_closed

    @property
    def view(self) -> SwarmView:
        """The newest known announcements; sends no request."""
        return self.swarm.book.view

    def view_swarm(self) -> SwarmView:
        """Read the directory and return all valid announcements of the model."""
        return self.portal.run(self.swarm.book.refresh())

    def close(self) -> None:
        """Close all streams and end the client's thread; safe to call twice.

        Calls that other threads are waiting for raise UsageError. A client that is not closed is
        closed when the interpreter exits.
        """
        self.portal.close()


def find_network(config: ClientConfig) -> Network:
    """Return TCP, with libp2p for relayed peers, and the DHT, joined by code or initial peers."""
    if not config.initial_peers and not config.join:
        raise UsageError(
            "no swarm is given: pass join='shoal:…', the code that `shoal serve MODEL --new-swarm` "
            "prints, or initial_peers=[...], addresses that `shoal serve` and `shoal swarm` print"
        )
    membership, addresses = load_swarm(config.join, config.initial_peers)
    return InternetNetwork(SystemClock(), addresses, membership)


def make_join(
    connect: Connect = find_network,
) -> Callable[[ModelId, PreTrainedConfig, ClientConfig], Client]:
    """Return a function that joins the swarm of a model over the network of `connect`."""

    def join(model_id: ModelId, model: PreTrainedConfig, config: ClientConfig) -> Client:
        known = SwarmModel(model_id, model.num_hidden_layers, model.hidden_size)
        return Client.join(config, connect(config), SystemClock(), known)

    return join
