"""With which options p2pd is started, and what it leaves behind when it is killed."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from shoal.protocol.net.libp2p.p2p_daemon import OwnGroupP2P, remove_dead_sockets


def test_sockets_where_nobody_listens_any_more_are_removed(tmp_path: Path) -> None:
    with ExitStack() as stack:
        for name in ("p2pd-dead", "p2pd-living", "p2pd-new", "other"):
            path = tmp_path / f"hivemind-{name}.sock"
            made = stack.enter_context(socket.socket(socket.AF_UNIX))
            made.bind(str(path))
            if name == "p2pd-living":
                made.listen()
            if name != "p2pd-new":
                os.utime(path, (0.0, 0.0))

        remove_dead_sockets(tmp_path)

    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [f"hivemind-{name}.sock" for name in ("other", "p2pd-living", "p2pd-new")]


@pytest.mark.parametrize(
    ("options", "is_relay"),
    [
        ({"relay": True, "forceReachabilityPublic": None}, True),
        ({"relay": True}, False),
        ({"relay": False}, False),
    ],
)
def test_relay_has_small_buffers_and_nobody_else_serves_as_one(
    options: dict[str, Any], is_relay: bool
) -> None:
    """A peer behind relays, or on loopback, is none."""
    words = OwnGroupP2P._make_process_args("p2pd", **options)

    given = dict(word[1:].split("=") for word in words if word.startswith("-relay"))
    assert (given.get("relayService") != "0") is is_relay
    if is_relay:
        names = ("relayBufferSize", "relayMaxReservations", "relayMaxCircuits")
        buffer_bytes, num_peers, num_circuits = (int(given[name]) for name in names)
        assert 2 * buffer_bytes * num_peers * num_circuits <= 64 * 2**20
