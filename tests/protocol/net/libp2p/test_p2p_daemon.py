"""What p2pds leave behind that were killed."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack
from pathlib import Path

from shoal.protocol.net.libp2p.p2p_daemon import remove_dead_sockets


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
