"""Makes a network in memory misbehave, from other threads than the network's own."""

import asyncio
import threading
from collections.abc import Callable, Sequence

from ...protocol.errors import UnavailableError, UsageError
from ...protocol.net.memory.loopback import Link, LoopbackNetwork

_PATIENCE_SECONDS = 30.0
"""How long a busy loop may take to do to its network what another thread asks for."""


class NetworkControl:
    """Causes failures between the hosts of a swarm whose client is connected.

    Every method is safe to call from any thread, has taken effect when it returns, and raises
    UsageError for a host that does not exist. For their effects see `LoopbackNetwork`.
    """

    def __init__(self, network: LoopbackNetwork, hosts: Sequence[str]) -> None:
        self._network = network
        self._hosts = tuple(hosts)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread: int | None = None

    def attach(self) -> None:
        """Control the network of the running loop."""
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()

    def detach(self) -> None:
        """Stop controlling: the network has ended."""
        self._loop = None

    def set_link(self, source: str, target: str, link: Link) -> None:
        """Change delay, bandwidth and losses in one direction."""
        self._run((source, target), lambda: self._network.set_link(source, target, link))

    def partition(self, a: str, b: str) -> None:
        """Block all traffic between two hosts."""
        self._run((a, b), lambda: self._network.partition(a, b))

    def heal(self, a: str, b: str) -> None:
        """End a partition."""
        self._run((a, b), lambda: self._network.heal(a, b))

    def kill(self, host: str) -> None:
        """End a host like `kill -9`; it does not return."""
        self._run((host,), lambda: self._network.kill(host))

    def pause(self, host: str) -> None:
        """Stop a host like SIGSTOP."""
        self._run((host,), lambda: self._network.pause(host))

    def resume(self, host: str) -> None:
        """Resume a paused host."""
        self._run((host,), lambda: self._network.resume(host))

    def _run(self, hosts: Sequence[str], act: Callable[[], None]) -> None:
        unknown = [host for host in hosts if host not in self._hosts]
        if unknown:
            raise UsageError(f"there is no host {unknown[0]}, only {', '.join(self._hosts)}")
        loop = self._loop
        if loop is None:
            raise UsageError("the network exists only while a client is connected")
        if threading.get_ident() == self._loop_thread:
            act()
            return
        done = threading.Event()
        loop.call_soon_threadsafe(act)
        loop.call_soon_threadsafe(done.set)
        if not done.wait(_PATIENCE_SECONDS):
            raise UnavailableError("the loop of the swarm's client does not react")
