"""The composition root of a peer: the parts that it is made of, and how they meet.

`shoal serve`, swarms in memory and tests build the same Peer, over another network and clock.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

from ..protocol.identity import Identity
from ..protocol.net.clock import Clock
from ..protocol.net.gossip import GossipDirectory
from ..protocol.net.network import Network, Presence
from .announcing.announcer import Announcer, announce_offline
from .announcing.self_description import (
    SelfDescription,
    make_template,
    watch_addresses,
    watch_relays,
)
from .hosting.span_loader import SpanLoader
from .placement.placer import PlacedModel, Placer
from .process.background import BackgroundTasks, LoopLag
from .process.config import PeerConfig, PeerEvent, Report, ignore
from .process.identity_file import hold_identity
from .pushing.connections import Connections
from .serving_loop import ServingLoop
from .streams.service import JoinedPeer
from .workloads import make_service

_logger = logging.getLogger(__name__)

GOSSIPS_PER_PERIOD = 3
"""Peers that are asked for what they know in the time between two announcements. What is new
spreads to about twice as many peers in each round, and holds for nine rounds."""

_LEAST_GOSSIP_SECONDS = 5.0
"""Where peers announce more often they are few, and each question costs two TLS handshakes."""

OpenLoader = Callable[[PeerConfig, Clock], SpanLoader]


@dataclass(frozen=True)
class Peer:
    """A peer that has joined its swarm and serves nothing yet."""

    config: PeerConfig
    joined: JoinedPeer
    """For what else the peer does beside its model. Its addresses are kept up to date."""
    announcer: Announcer
    loader: SpanLoader
    directory: GossipDirectory
    lag: LoopLag
    loop: ServingLoop
    _placer: Placer
    _tasks: BackgroundTasks

    @classmethod
    @asynccontextmanager
    async def join(
        cls,
        config: PeerConfig,
        network: Network,
        clock: Clock,
        report: Report = ignore,
        *,
        identity: Identity | None = None,
        open_loader: OpenLoader = SpanLoader.open,
    ) -> AsyncGenerator[Peer]:
        """Open the model, listen and join the directory; leave in good order at the end.

        Without an `identity` it is that of `config.identity_path`, or a fresh one. `open_loader`
        opens the model; tests pass one that computes otherwise.

        Reports `started` and `directory`, and `waiting` while nobody answers. Raises UsageError for
        what the caller can mend and DirectoryError when the swarm cannot be joined; whatever was
        begun is undone before.
        """
        async with AsyncExitStack() as stack:
            identity = identity or stack.enter_context(hold_identity(config.identity_path))
            loader = await asyncio.to_thread(open_loader, config, clock)
            report(PeerEvent("started", _describe_start(identity, loader)))
            joining = JoinedPeer.join(network, identity, clock, report)
            joined = await stack.enter_async_context(joining)
            yield await cls._compose(stack, config, loader, joined, clock, report)

    @classmethod
    async def _compose(
        cls,
        stack: AsyncExitStack,
        config: PeerConfig,
        loader: SpanLoader,
        joined: JoinedPeer,
        clock: Clock,
        report: Report,
    ) -> Peer:
        """Make the parts and begin what runs in the background; the stack ends all of it."""
        presence, handler, model = joined.presence, joined.handler, loader.model
        identity = presence.identity
        period_seconds = config.announce_period_seconds
        # Nobody else can foretell what it draws; an identity that a test gives draws the same.
        rng = random.Random(identity.derive_secret("shoal random numbers"))
        directory = _make_directory(presence, loader, clock)
        stack.push_async_callback(directory.stop)
        presence = replace(presence, directory=directory)
        joined = replace(joined, presence=presence)
        lag = LoopLag(clock)
        connections = Connections.make(
            identity, presence, model.model_id, handler.serve, clock, period_seconds, rng,
            handler.counts.note_pushed,
        )  # fmt: skip
        block_bytes, num_blocks = max(model.sizes.num_bytes), model.spec.num_blocks
        template = make_template(config, model.model_id, num_blocks, presence, block_bytes)
        description = SelfDescription(template, lag, model.sizes.work, connections.describers)
        announcer = Announcer(directory, identity, description.describe, clock, period_seconds)
        stack.push_async_callback(announce_offline, announcer)
        tasks = await stack.enter_async_context(BackgroundTasks())
        tasks.begin(lag.run())
        tasks.begin(connections.round_trip_times.run())
        gossip_seconds = max(period_seconds / GOSSIPS_PER_PERIOD, _LEAST_GOSSIP_SECONDS)
        tasks.begin(directory.run(gossip_seconds))
        tasks.begin(watch_addresses(presence, description, announcer, report))
        if connections.reverse is not None:
            tasks.begin(watch_relays(presence, model.model_id, description, announcer, report))
            tasks.begin(connections.reverse.run(partial(_note_parked, announcer, report)))
        stack.push_async_callback(connections.push_links.close)
        for listener in presence.listeners:
            stack.push_async_callback(listener.close)
        stack.callback(lambda: _logger.info("the peer stopped; its loop lag was %r", lag))
        renew, counts = announcer.renew_now, handler.counts
        make = partial(make_service, presence, loader, connections, renew, clock, counts)
        loop = ServingLoop(
            loader,
            make,
            handler,
            announcer,
            description,
            report,
            lambda: {
                "endpoint": str(description.endpoint),
                "addresses": list(directory.addresses),
            },
            config.drain_seconds,
        )
        placed = PlacedModel(model.model_id, model.sizes.work, model.find_room())
        placer = Placer(placed, presence, announcer, description, clock, rng)
        return cls(config, joined, announcer, loader, directory, lag, loop, placer, tasks)

    async def serve(self, stop: asyncio.Event) -> None:
        """Serve the configured span, or those that the swarm needs, until `stop` is set.

        Reports `placed` (where, if that is not told), `loading` (per block), `online`, maybe
        `moving`, `loading` and `online` again (or, where that was not possible, `returning`); and
        what `SwarmNews` tells.

        Raises UsageError where there is no room for any block, LoadError when the first blocks
        cannot be loaded and RevokedError when the owner of the swarm has shut the peer out.
        """
        await self.loop.run(self.config.span, self._placer, self._tasks, stop)


def _make_directory(presence: Presence, loader: SpanLoader, clock: Clock) -> GossipDirectory:
    rng = random.Random(presence.identity.derive_secret("shoal gossip"))
    return GossipDirectory(
        presence.directory,
        loader.model.model_id,
        presence.transport,
        clock,
        rng,
        lambda peer: bool(peer.endpoints),  # our transport reaches nobody behind relays
    )


def _describe_start(identity: Identity, loader: SpanLoader) -> dict[str, object]:
    return {
        "peer_id": identity.peer_id,
        "model_id": loader.model.model_id,
        "free_bytes": loader.model.read_free_bytes(),
        "weight_bytes": loader.model.weight_bytes,
        "kv_bytes": loader.model.config.kv_budget_bytes,
        "pass_bytes": loader.model.pass_bytes,
        "adapter_bytes": loader.model.adapter_bytes,
        "message_bytes": loader.model.message_bytes,
        "announcement_bytes": loader.model.announcement_bytes,
        "block_cache_bytes": loader.model.config.block_cache_bytes,
    }


def _note_parked(announcer: Announcer, report: Report, parked_at: Sequence[str]) -> None:
    """Announce and report which peers can push to us over connections of ours (`parked`)."""
    announcer.renew_now()
    report(PeerEvent("parked", {"parked_at": list(parked_at)}))
