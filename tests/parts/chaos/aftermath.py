"""What peers hold when nobody uses them any more: nothing, or a long chaos would fill them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from chaos.links import STRANGER_HOST, is_connected
from chaos.live_swarm import LiveSwarm

from shoal.peer.local_swarm.swarm import PeerProcessError

_QUIET_SECONDS = 60.0
"""How long peers may take to let go: 10 s for connections that they dialled and do not use, and a
pause or a cut may have kept them from hearing of an end."""

_POLL_SECONDS = 0.5


def measure_room(model: Any) -> dict[int, int]:
    """Return how many tokens peers could take, by the length of their span."""
    view = model._client.view_swarm()
    return {len(peer.span): peer.free_kv_tokens for peer in view.online}


def check_nothing_is_held(swarm: LiveSwarm, model: Any, room_at_first: Mapping[int, int]) -> None:
    """Wait until all peers are as free as in the beginning and hold no connection.

    Raises PeerProcessError when that does not come.
    """
    deadline = time.monotonic() + _QUIET_SECONDS
    while held := [*_find_held(swarm, model, room_at_first), *swarm.links.list_open()]:
        if time.monotonic() > deadline:
            raise PeerProcessError(f"still held when nobody uses the swarm: {', '.join(held)}")
        time.sleep(_POLL_SECONDS)


def _find_held(swarm: LiveSwarm, model: Any, room_at_first: Mapping[int, int]) -> Iterator[str]:
    view = model._client.view_swarm()
    for name, process in swarm.running.items():
        if is_connected(process.pid, STRANGER_HOST):
            yield f"a connection to the stranger at {name}"
        peer = view.find(process.peer_id)
        if peer is None or peer not in view.online:
            yield f"the place of {name}, which is not announced"
        elif (missing := room_at_first[len(peer.span)] - peer.free_kv_tokens) > 0:
            yield f"room for {missing} tokens at {name}"
