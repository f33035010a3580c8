"""A client's main path: join a swarm, open sessions over it, leave."""

import importlib
import random
import secrets
from collections.abc import Awaitable, Callable
from types import TracebackType

from ...protocol.errors import DirectoryError, UsageError
from ...protocol.ids import ModelId, PeerId, SessionId
from ...protocol.limits import MAX_SESSION_TOKENS
from ...protocol.membership.join_code import find_way_in
from ...protocol.net.choosing_transport import ChoosingTransport
from ...protocol.net.clock import SystemClock
from ...protocol.net.directory import Directory
from ...protocol.net.transport import Transport
from ...protocol.records.swarm_view import SwarmView
from ...protocol.spans import Span
from ..adapters.adapter_versions import SentAdapter
from ..concurrency.portal import Portal
from ..passes.pass_asking import PassAsker
from ..passes.session_adapter import SessionAdapter
from ..publishing.publisher import Publisher
from ..routing.router import Route
from ..routing.swarm import Swarm
from ..session.farewells import Farewells
from ..session.inference_session import InferenceSession
from ..session.live_hops import LiveHops
from ..session.route_opening import SessionFacts
from ..session.session import RemoteSession
from ..settings.config import ClientConfig, make_whole, read_kv_format
from ..training.autograd import PassRunner
from ..training.remote_passes import RemotePasses
from .chosen_peers import choose_peers

Connect = Callable[[ClientConfig], Awaitable[tuple[Transport, Directory]]]
"""Makes the transport and the directory of a client. Called on the client's loop."""


async def connect_over_network(config: ClientConfig) -> tuple[Transport, Directory]:
    """Return TCP, with libp2p for relayed peers, and the DHT, joined by code or initial peers.

    They are imported here, not above: the import takes seconds, which a client over loopback and
    `--help` do not need.
    """
    if not config.initial_peers and not config.join:
        raise UsageError(
            "no swarm is given: pass join='shoal:…', the code that `shoal serve --new-swarm` "
            "prints, or initial_peers=[...], addresses that `shoal serve` and `shoal swarm` print"
        )
    membership, addresses = find_way_in(config.join, config.initial_peers)
    tcp_transport = importlib.import_module("...protocol.net.tcp.tcp_transport", __package__)
    hivemind_directory = importlib.import_module(
        "...protocol.net.dht.hivemind_directory", __package__
    )
    directory = await hivemind_directory.HivemindDirectory.join(
        addresses, identity=None, clock=SystemClock(), client_mode=True, membership=membership
    )
    direct = tcp_transport.TcpTransport(membership=directory.membership)
    return ChoosingTransport(direct, directory.make_transport()), directory


class Client:
    """A member of one model's swarm that does not serve. Close it, or use it in a `with` block.

    Its asynchronous parts run on an event loop of its own, so that plain scripts can use it.
    """

    def __init__(
        self, portal: Portal, swarm: Swarm, transport: Transport, directory: Directory,
        hidden_size: int, config: ClientConfig,
    ) -> None:  # fmt: skip
        self._portal = portal
        self._swarm = swarm
        self._transport = transport
        self._directory = directory
        self._hidden_size = hidden_size
        self._config = config
        self._farewells = Farewells()
        self._secret = secrets.token_bytes(16)
        self._asker = PassAsker(swarm, transport, SystemClock(), config, self._secret)
        publisher = Publisher(self._asker, SystemClock())
        self._passes = RemotePasses(self._asker, publisher)
        self.passes = PassRunner(self._passes, portal)
        portal.run_last(self._leave)

    def __repr__(self) -> str:
        return f"<Client of {self._swarm!r}>"

    @classmethod
    def join(
        cls,
        model_id: ModelId,
        num_blocks: int,
        hidden_size: int,
        config: ClientConfig,
        connect: Connect = connect_over_network,
    ) -> "Client":
        """Join a swarm and return when its directory was read once.

        Raises DirectoryError if no initial peer answers at the second attempt.
        """
        portal = Portal()

        async def join_on_loop() -> Client:
            try:
                return await join_once()
            except DirectoryError:
                # A busy machine may have been too slow, above all where many join at once.
                return await join_once()

        async def join_once() -> Client:
            transport, directory = await connect(config)
            rng = random.Random(config.seed)
            chosen = choose_peers(directory, config)
            swarm = Swarm(chosen, model_id, num_blocks, SystemClock(), rng)
            try:
                await swarm.refresh()
            except BaseException:
                await directory.close()
                await transport.close()
                raise
            return cls(portal, swarm, transport, directory, hidden_size, config)

        try:
            return portal.run(join_on_loop())
        except BaseException:
            portal.close()
            raise

    def __enter__(self) -> "Client":
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
        sent = None if adapter is None else SessionAdapter(adapter, self._asker)
        known_format = read_kv_format(self._config.kv_format if kv_format is None else kv_format)
        max_length = make_whole("max_length", max_length)
        if max_length < 1:
            raise UsageError(f"a session needs a length of at least one token, not {max_length}")
        if max_length > MAX_SESSION_TOKENS:
            raise UsageError(
                f"max_length is at most {MAX_SESSION_TOKENS} tokens, whatever the model, not "
                f"{max_length}"
            )

        def open_remote() -> RemoteSession:
            facts = SessionFacts(
                SessionId(secrets.token_bytes(16)),
                self._swarm.view.model_id,
                span,
                self._hidden_size,
                max_length,
                self._secret,
                known_format,
                sent,
            )
            hops = LiveHops(
                facts,
                self._swarm,
                self._transport,
                SystemClock(),
                self._config,
                self._farewells,
            )
            return RemoteSession(hops)

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
        return self._swarm.view

    @property
    def avoided_peers(self) -> frozenset[PeerId]:
        """Peers in quarantine after a failure; they are used only if there are no others."""
        return self._swarm.avoided

    @property
    def missing_blocks(self) -> tuple[Span, ...]:
        """The blocks that no peer serves, by the newest known announcements; sends no request."""
        return self._swarm.view.gaps

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
        return self._portal.run(self._swarm.refresh())

    def close(self) -> None:
        """Close all streams and end the client's thread; safe to call twice.

        Calls that other threads are waiting for raise UsageError. A client that is not closed is
        closed when the interpreter exits.
        """
        self._portal.close()

    async def _leave(self) -> None:
        try:
            await self._farewells.finish()
            await self._passes.close()
            await self._transport.close()
        finally:
            await self._directory.close()
