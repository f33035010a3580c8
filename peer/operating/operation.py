"""Runs beside a peer what its owner asked for: metrics over HTTP."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncGenerator, Callable, Generator
from dataclasses import dataclass
from functools import partial

from ...protocol.endpoints import is_loopback
from ...protocol.net.clock import Clock
from ..process.background import BackgroundTasks
from ..process.config import PeerEvent, Report
from .figures import Figures, OperatedPeer, read_figures

_MAX_CONNECTIONS = 16
"""To the metrics: more than a few readers are a mistake, or somebody else's."""

_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
"""Under which metrics are asked for that are for this machine only: a page in a browser could point
its own name here and read them."""


@dataclass(frozen=True)
class OperatingConfig:
    """What the owner of a machine asked for beside the peer itself."""

    metrics: tuple[str, int] | None = None
    """Host and port of the Prometheus metrics; port 0: any free one; None: they are not served."""


class Operation:
    """What runs beside a peer; its sockets are there before the peer is."""

    def __init__(self, config: OperatingConfig, metrics_socket: socket.socket | None) -> None:
        self._config = config
        self._metrics_socket = metrics_socket

    @classmethod
    @contextlib.contextmanager
    def prepare(cls, config: OperatingConfig) -> Generator[Operation]:
        """Open what is listened on. Raises UsageError where that cannot be done."""
        with contextlib.ExitStack() as stack:
            metrics_socket = None
            if config.metrics is not None:
                from .http_server import listen  # a quarter of a second that most do not need

                metrics_socket = stack.enter_context(listen(*config.metrics, "--metrics"))
            yield cls(config, metrics_socket)

    @contextlib.asynccontextmanager
    async def run(
        self, peer: OperatedPeer, clock: Clock, report: Report
    ) -> AsyncGenerator[Callable[[], Figures]]:
        """Run beside a peer until the end of the block; yields what reads its figures.

        Reports `metrics` with their address.
        """
        read = partial(read_figures, peer, clock)
        async with BackgroundTasks() as tasks:
            if self._metrics_socket is not None and self._config.metrics is not None:
                from .http_server import name_url, serve_app
                from .metrics import make_metrics_page

                is_local = is_loopback(self._config.metrics[0])
                hosts = _LOOPBACK_NAMES if is_local else ("*",)
                page = make_metrics_page(read, hosts)
                tasks.begin(serve_app(page, self._metrics_socket, _MAX_CONNECTIONS))
                url = f"{name_url(self._metrics_socket)}metrics"
                report(PeerEvent("metrics", {"url": url}))
            yield read
