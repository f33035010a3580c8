"""Runs beside a peer what its owner asked for: metrics over HTTP, control by gRPC, a schedule."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import AsyncGenerator, Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from ...protocol.endpoints import is_loopback
from ...protocol.errors import UsageError
from ...protocol.net.clock import Clock
from ..process.background import BackgroundTasks
from ..process.config import PeerEvent, Report
from ..streams.stream_host import ServiceCounts
from .control import ControlledPeer, EventFeed, PeerControl
from .figures import Figures, OperatedPeer, read_figures
from .operator_config import OperatorConfig
from .run_figures import RunFigures
from .schedule import ScheduleFollower

_logger = logging.getLogger(__name__)

_MAX_CONNECTIONS = 16
"""To the metrics: more than a few readers are a mistake, or somebody else's."""

_KEPT_SECONDS = 90
"""How long a connection waits for the next scrape: to make one costs half as much as the answer."""

_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
"""Under which metrics are asked for that are for this machine only: a page in a browser could point
its own name here and read them."""


class Operated(OperatedPeer, ControlledPeer, Protocol):
    """A peer that its owner looks into and changes."""


@dataclass(frozen=True)
class OperatingConfig:
    """What the owner of a machine asked for beside the peer itself."""

    metrics: tuple[str, int] | None = None
    """Host and port of the Prometheus metrics; port 0: any free one; None: they are not served."""

    operator: OperatorConfig = field(default_factory=OperatorConfig)
    """How the owner's tools reach the peer, and when it serves."""


class MetricsEndpoint:
    """Serves the metrics of a peer; its socket is there before the peer is."""

    def __init__(self, host: str, listening: socket.socket | None) -> None:
        self.run = RunFigures()
        """The training run of the peer. Tell it all events."""
        self._host = host
        self._listening = listening

    @classmethod
    @contextlib.contextmanager
    def prepare(cls, place: tuple[str, int] | None) -> Generator[MetricsEndpoint]:
        """Listen at a host and port; None: serve nothing. Raises UsageError where that fails."""
        if place is None:
            yield cls("", None)
            return
        from .http_server import listen  # a quarter of a second that most do not need

        with listen(*place, "--metrics") as listening:
            yield cls(place[0], listening)

    @contextlib.asynccontextmanager
    async def serve(
        self, read: Callable[[], Figures | ServiceCounts], report: Report
    ) -> AsyncGenerator[None]:
        """Serve what `read` returns, and the run, until the end of the block.

        Reports `metrics` with their address.
        """
        async with BackgroundTasks() as tasks:
            if self._listening is not None:
                from .http_server import name_url, serve_app
                from .metrics import make_metrics_page

                hosts = _LOOPBACK_NAMES if is_loopback(self._host) else ("*",)
                page = make_metrics_page(read, self.run, hosts)
                tasks.begin(serve_app(page, self._listening, _MAX_CONNECTIONS, _KEPT_SECONDS))
                report(PeerEvent("metrics", {"url": f"{name_url(self._listening)}metrics"}))
            yield


class Operation:
    """What runs beside a peer; its sockets are there before the peer is."""

    def __init__(self, config: OperatingConfig, metrics: MetricsEndpoint) -> None:
        self._config = config
        self.run_figures = metrics.run
        """The training run that the peer takes part in beside what it serves."""
        self._metrics = metrics
        self._events = EventFeed()

    @classmethod
    @contextlib.contextmanager
    def prepare(cls, config: OperatingConfig) -> Generator[Operation]:
        """Open what is listened on. Raises UsageError where that cannot be done."""
        with MetricsEndpoint.prepare(config.metrics) as metrics:
            yield cls(config, metrics)

    def pass_on(self, report: Report, clock: Clock) -> Report:
        """Return what reports events of a peer, so that its owner's tools see them as well."""

        def note(event: PeerEvent) -> None:
            self._events.note(event, clock.wall())
            self.run_figures.note(event)
            report(event)

        return note

    @contextlib.asynccontextmanager
    async def run(
        self, peer: Operated, clock: Clock, report: Report
    ) -> AsyncGenerator[Callable[[], Figures]]:
        """Run beside a peer until the end of the block; yields what reads its figures.

        Reports `metrics` and `operator` with their addresses. Raises UsageError where the owner's
        tools cannot reach the peer as they should.
        """
        read = partial(read_figures, peer, clock)
        async with contextlib.AsyncExitStack() as stack:
            follower = ScheduleFollower(
                self._config.operator.schedule,
                peer.loop.pauses,
                clock,
                peer.joined.handler.counts.count_traffic,
            )
            control = PeerControl(peer, clock, self._events, follower)
            await stack.enter_async_context(self._serve_operator(control, report))
            tasks = await stack.enter_async_context(BackgroundTasks())
            tasks.begin(follower.run())
            await stack.enter_async_context(self._metrics.serve(read, report))
            yield read

    @contextlib.asynccontextmanager
    async def _serve_operator(self, control: PeerControl, report: Report) -> AsyncGenerator[None]:
        """Serve the owner's tools. Without a socket for them the peer runs all the same."""
        config = self._config.operator
        async with contextlib.AsyncExitStack() as stack:
            if config.has_socket or config.tcp is not None:
                from .operator_server import serve_operator  # a moment that tests can do without

                try:
                    addresses = await stack.enter_async_context(
                        serve_operator(control, config.has_socket, config.tcp)
                    )
                    facts = {"name": control.name, "operator_addresses": addresses}
                    report(PeerEvent("operator", facts))
                except UsageError as error:
                    if config.tcp is not None:
                        raise
                    _logger.warning("`shoal peers` cannot reach this peer: %s", error)
            yield
