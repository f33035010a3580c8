"""A whole network in one process: transports between named hosts, with trouble on demand.

Uses asyncio's time only, so that on a virtual loop days of network take no real time. Everything
here belongs to one event loop; nothing is safe to call from another thread.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import random
from dataclasses import dataclass

from ...endpoints import Endpoint
from ...errors import LocalProtocolError, RemoteProtocolError, UnavailableError, UsageError
from ...membership.membership import Membership
from ..transport import StreamServer, serve_stream, turn_away
from .loopback_wire import LoopbackStream, Pipe, Signal, Wire

log = logging.getLogger(__name__)

_RETRANSMISSION_SECONDS = 0.2
"""The least time after which a lost frame is sent again (Linux's TCP_RTO_MIN)."""

_MAX_RETRANSMISSIONS = 5
"""A frame lost more often than this in a row breaks its stream."""

_PARTITION_BREAK_SECONDS = 25.0
"""Streams across a partition break after this long: the keepalive of the real transport."""

_LAST_WORDS_SECONDS = 1.0
_FIRST_FREE_PORT = 49152


@dataclass(frozen=True)
class Link:
    """One direction between two hosts, for each stream.

    A lost frame is not missing, as under TCP: it is sent again after 0.2 s (or two delays, where
    that is longer), twice that the next time, and holds up all frames behind it. A frame lost six
    times in a row breaks the stream. Streams do not share the bandwidth: each has all of it.
    """

    delay_seconds: float = 0.0
    bandwidth_bytes_per_second: float = math.inf
    loss_fraction: float = 0.0


class LoopbackNetwork:
    """The hosts of one process and what lies between them. Losses are drawn from the seed."""

    def __init__(self, seed: int = 0, link: Link | None = None) -> None:
        self._random = random.Random(seed)
        self._seed = seed
        self.default_link = link or Link()
        self._links: dict[tuple[str, str], Link] = {}
        self._partitions: dict[frozenset[str], asyncio.TimerHandle] = {}
        self._paused: set[str] = set()
        self._dead: set[str] = set()
        self._wires: set[Wire] = set()
        self._listeners: dict[tuple[str, int], _LoopbackListener] = {}

    def __repr__(self) -> str:
        return (
            f"LoopbackNetwork(streams={len(self._wires)}, listeners={len(self._listeners)}, "
            f"partitions={len(self._partitions)}, paused={len(self._paused)}, "
            f"dead={len(self._dead)})"
        )

    def set_link(self, source: str, target: str, link: Link) -> None:
        """Change one direction between two hosts, for frames sent from now on."""
        self._links[source, target] = link

    def partition(self, a: str, b: str) -> None:
        """Let nothing through between two hosts. Nothing breaks for 25 seconds, then everything."""
        pair = frozenset((a, b))
        if pair not in self._partitions:
            loop = asyncio.get_running_loop()
            self._partitions[pair] = loop.call_later(_PARTITION_BREAK_SECONDS, self._give_up, pair)

    def heal(self, a: str, b: str) -> None:
        """End a partition: what was held up arrives now."""
        timer = self._partitions.pop(frozenset((a, b)), None)
        if timer is not None:
            timer.cancel()
            self._stir()

    def kill(self, host: str) -> None:
        """End a host like `kill -9`: its streams break at both ends, its listeners vanish."""
        self._dead.add(host)
        self._paused.discard(host)
        for key in [key for key in self._listeners if key[0] == host]:
            del self._listeners[key]
        for wire in [wire for wire in self._wires if host in wire.hosts]:
            wire.break_off(f"{host} was killed")

    def revive(self, host: str) -> None:
        """Let a killed host start again, with nothing of what it had."""
        self._dead.discard(host)

    def pause(self, host: str) -> None:
        """Stop a host like SIGSTOP: nothing reaches or leaves it, and nothing breaks."""
        self._paused.add(host)

    def resume(self, host: str) -> None:
        """Let a paused host go on: what was held up arrives now."""
        self._paused.discard(host)
        self._stir()

    def fingerprint_of(self, host: str, port: int) -> str:
        """Return the fingerprint that a listener of this host and port shows."""
        return hashlib.sha256(f"{self._seed}/{host}/{port}".encode()).hexdigest()

    def is_blocked(self, source: str, target: str) -> bool:
        """Return whether nothing gets from one host to the other at this moment."""
        if source in self._paused or target in self._paused:
            return True
        return frozenset((source, target)) in self._partitions

    def is_paused(self, host: str) -> bool:
        """Return whether a host stands still."""
        return host in self._paused

    def check_alive(self, host: str) -> None:
        """Raise UnavailableError for whatever a killed host still tries to do."""
        if host in self._dead:
            raise UnavailableError(f"{host} was killed")

    def plan_arrival(self, pipe: Pipe, num_bytes: int) -> float | None:
        """Draw when a frame sent now arrives, in the loop's time; None: lost once too often."""
        no_link = Link() if pipe.source == pipe.target else self.default_link
        link = self._links.get((pipe.source, pipe.target), no_link)
        sent_at = max(asyncio.get_running_loop().time(), pipe.busy_until)
        sent_at += num_bytes / link.bandwidth_bytes_per_second
        pipe.busy_until = sent_at
        patience = max(_RETRANSMISSION_SECONDS, 2 * link.delay_seconds)
        for _ in range(_MAX_RETRANSMISSIONS + 1):
            if self._random.random() >= link.loss_fraction:
                return sent_at + link.delay_seconds
            sent_at += patience
            patience *= 2
        return None

    def add_listener(self, listener: _LoopbackListener) -> None:
        """Let a listener be found. Raises UsageError when its port is in use."""
        host, port = listener.endpoint.host, listener.endpoint.port
        if (host, port) in self._listeners:
            raise UsageError(f"port {port} on {host} is in use; choose another one")
        self._listeners[host, port] = listener

    def remove_listener(self, listener: _LoopbackListener) -> None:
        """Let a listener be found no more."""
        key = (listener.endpoint.host, listener.endpoint.port)
        if self._listeners.get(key) is listener:
            del self._listeners[key]

    def choose_port(self, host: str) -> int:
        """Return a port of a host that is not in use."""
        port = _FIRST_FREE_PORT
        while (host, port) in self._listeners:
            port += 1
        return port

    def answer(self, wire: Wire, endpoint: Endpoint, proof: bytes) -> Signal:
        """Accept or turn down a stream whose request has reached its target."""
        listener = self._listeners.get((endpoint.host, endpoint.port))
        if listener is None:
            return Signal.REFUSED
        if listener.endpoint.fingerprint != endpoint.fingerprint:
            return Signal.WRONG_CERTIFICATE
        if not listener.takes(proof):
            return Signal.NOT_A_MEMBER
        listener.accept(wire)
        return Signal.ACCEPTED

    def register(self, wire: Wire) -> None:
        """Make a wire subject to what happens to its hosts."""
        self._wires.add(wire)

    def forget(self, wire: Wire) -> None:
        """Take note that a wire is over."""
        self._wires.discard(wire)

    def _stir(self) -> None:
        for wire in list(self._wires):
            wire.stir()

    def _give_up(self, pair: frozenset[str]) -> None:
        for wire in [wire for wire in self._wires if wire.hosts == pair]:
            wire.break_off("the other end was silent for too long")


class LoopbackTransport:
    """The transport of one host of a loopback network; in a private swarm among members only."""

    def __init__(
        self, network: LoopbackNetwork, host_name: str, membership: Membership | None = None
    ) -> None:
        self._network = network
        self._host = host_name
        self._membership = membership
        self._dialled: set[Wire] = set()
        self._listeners: set[_LoopbackListener] = set()
        self._is_closed = False

    async def listen(self, host: str, port: int, serve: StreamServer) -> _LoopbackListener:
        self._check_open()
        if host not in (self._host, "0.0.0.0", "::"):
            raise UsageError(f"cannot listen on {host}: this host is {self._host}")
        port = port or self._network.choose_port(self._host)
        fingerprint = self._network.fingerprint_of(self._host, port)
        endpoint = Endpoint(self._host, port, fingerprint)
        listener = _LoopbackListener(self._network, endpoint, serve, self._membership)
        self._network.add_listener(listener)
        self._listeners.add(listener)
        return listener

    async def open_stream(self, endpoint: Endpoint, timeout_seconds: float = 5.0) -> LoopbackStream:
        self._check_open()
        proof = self._membership.prove_to(endpoint.fingerprint) if self._membership else b""
        wire = Wire(self._network, self._host, endpoint.host)
        self._network.register(wire)
        try:
            async with asyncio.timeout(timeout_seconds):
                wire.request(lambda: self._network.answer(wire, endpoint, proof))
                answer = await wire.back.take()
        except BaseException as error:
            wire.break_off("the dialler gave up")
            if isinstance(error, TimeoutError):
                detail = f"{endpoint} did not answer within {timeout_seconds:g} s"
                raise UnavailableError(detail) from error
            raise
        if answer is Signal.ACCEPTED:
            self._dialled = {wire for wire in self._dialled if not wire.is_over}
            self._dialled.add(wire)
            return LoopbackStream(wire, wire.forward, wire.back)
        wire.break_off("the stream was turned down")
        if answer is Signal.WRONG_CERTIFICATE:
            raise RemoteProtocolError(
                f"the peer at {endpoint} presents another TLS certificate than it announced"
            )
        if answer is Signal.NOT_A_MEMBER:
            is_private = self._membership is not None and self._membership.is_private
            raise turn_away(endpoint, has_secret=is_private)
        raise UnavailableError(f"nobody answers at {endpoint}: connection refused")

    async def close(self) -> None:
        self._is_closed = True
        for wire in self._dialled:
            wire.break_off("its transport was closed")
        for listener in self._listeners:
            await listener.close()

    def _check_open(self) -> None:
        self._network.check_alive(self._host)
        if self._is_closed:
            raise LocalProtocolError("this transport is closed")


class _LoopbackListener:
    """The streams that a host accepts on one port, and the tasks that serve them."""

    def __init__(
        self,
        network: LoopbackNetwork,
        endpoint: Endpoint,
        serve: StreamServer,
        membership: Membership | None,
    ) -> None:
        self._network = network
        self._endpoint = endpoint
        self._serve = serve
        self._membership = membership
        self._tasks: dict[asyncio.Task[None], Wire] = {}

    @property
    def endpoint(self) -> Endpoint:
        return self._endpoint

    def takes(self, proof: bytes) -> bool:
        """Return whether a dialler with this proof may come in."""
        membership = self._membership
        return membership is None or membership.accepts(self._endpoint.fingerprint, proof)

    def accept(self, wire: Wire) -> None:
        """Serve the listening end of a wire in a task of its own."""
        stream = LoopbackStream(wire, wire.back, wire.forward)
        name = f"serve {self._endpoint}"
        serving = serve_stream(self._serve, stream, self._endpoint, wire.break_off)
        task = asyncio.create_task(serving, name=name)
        self._tasks[task] = wire
        task.add_done_callback(self._tasks.pop)

    async def close(self, grace_seconds: float = 0.0) -> None:
        self._network.remove_listener(self)
        tasks = {
            task: wire for task, wire in self._tasks.items() if task is not asyncio.current_task()
        }
        if tasks and grace_seconds > 0:
            await asyncio.wait(tasks, timeout=grace_seconds)
        for wire in tasks.values():
            wire.break_off("the listener was closed")
        if tasks:
            await asyncio.wait(tasks, timeout=_LAST_WORDS_SECONDS)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_LAST_WORDS_SECONDS)
