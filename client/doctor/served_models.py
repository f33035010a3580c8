"""Finds out which models a swarm serves, how completely and how fast: behind `shoal models`."""

import asyncio
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ...protocol.errors import DirectoryError, RouteError
from ...protocol.ids import ModelId, PeerId
from ...protocol.records.swarm_view import SwarmView
from ...protocol.spans import Span
from ..routing.route import Ends
from ..routing.router import RoutingCosts, expect_way_seconds, plan_route
from .peer_check import check_peers
from .probes import JoinedSwarm, Probes

MAX_MODELS = 32
"""So many are looked at, by lot: anybody may announce a model."""

_MODELS_AT_ONCE = 4
_MODEL_SECONDS = 30.0
"""How long the peers of one model may keep us waiting, all together."""


@dataclass(frozen=True)
class ServedModel:
    """One model of a swarm, as peers serve it that answered."""

    view: SwarmView
    """Only the peers that answered as they announced."""
    num_silent: int
    """Peers that are announced as online and did not answer so."""
    num_unasked: int
    """Peers that are announced as online, of which there are too many to ask them all."""
    tokens_per_second: float | None
    """Of one text, over the best route from here; None if blocks are missing, or nobody says."""

    @property
    def name(self) -> str:
        """What most of its peers call it; empty if they say nothing."""
        names = Counter(peer.model_name for peer in self.view.online if peer.model_name)
        return min(names, key=lambda name: (-names[name], name), default="")

    @property
    def is_complete(self) -> bool:
        """Whether text can be generated with it."""
        return self.num_replicas > 0

    @property
    def num_replicas(self) -> int:
        """Peers at the block that fewest of them serve."""
        return min(map(len, self.view.coverage), default=0)


async def find_served_models(joined: JoinedSwarm, probes: Probes) -> list[ServedModel]:
    """Ask a swarm for its models, and the peers of each whether they serve it; the best first.

    Raises DirectoryError when the directory cannot be reached.
    """
    model_ids = await joined.directory.list_models()
    drawn = random.sample(model_ids, min(len(model_ids), MAX_MODELS))
    turns = asyncio.Semaphore(_MODELS_AT_ONCE)

    async def look(model_id: ModelId) -> ServedModel | None:
        async with turns:
            return await _look_at(model_id, joined, probes)

    found = [one for one in await asyncio.gather(*map(look, drawn)) if one is not None]
    return sorted(found, key=lambda one: (-one.num_replicas, -len(one.view.online), one.name))


async def _look_at(model_id: ModelId, joined: JoinedSwarm, probes: Probes) -> ServedModel | None:
    """Return what is known of a model; None if nobody announces any more that it serves it."""
    try:
        announced = await joined.directory.lookup(model_id)
    except DirectoryError:  # it went away since it named the model
        announced = joined.directory.records.list_current(model_id, probes.clock.wall())
    view = SwarmView.from_announcements(model_id, announced, probes.clock.wall())
    if not view.online:
        return None
    checks = await check_peers(view.online, joined.transport, probes, _MODEL_SECONDS)
    answered = {check.peer.peer_id for check in checks if check.fault is None}
    rtts = {check.peer.peer_id: check.rtt_seconds for check in checks if check.rtt_seconds}
    sound = replace(view, peers=tuple(one for one in view.peers if one.peer_id in answered))
    return ServedModel(
        sound,
        num_silent=len(checks) - len(answered),
        num_unasked=len(view.online) - len(checks),
        tokens_per_second=estimate_tokens_per_second(sound, rtts),
    )


def estimate_tokens_per_second(
    view: SwarmView, rtt_seconds: Mapping[PeerId, float]
) -> float | None:
    """Return how fast one text goes over the best chain from here, by what its peers announce.

    None if blocks are missing, or a peer of the chain does not say how fast it is. The work of the
    client, which has the embedding and the head, is not in it.
    """
    costs = RoutingCosts(rtt_seconds, noise_fraction=0.0)
    try:
        route = plan_route(view, Span(0, view.num_blocks), costs, random.Random(0), ends=Ends())
    except RouteError:
        return None
    seconds = sum(expect_way_seconds([hop.peer for hop in route.hops], costs))
    for hop in route.hops:
        peer = hop.peer
        speeds = (peer.decode_steps_per_second, peer.loaded_decode_steps_per_second)
        known = [speed for speed in speeds if speed]
        if not known:
            return None
        seconds += peer.queue_seconds + len(hop.span) / len(peer.span) / min(known)
    return 1 / seconds
