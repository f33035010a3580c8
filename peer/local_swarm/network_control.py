"""A network in memory made to misbehave by other threads than the one it belongs to."""

import asyncio
import threading
from collections.abc import Callable, Sequence

from ...protocol.errors import UnavailableError, UsageError
from ...protocol.net.memory.loopback import Link, LoopbackNetwork

_PATIENCE_SECONDS = 30.0
"""How long a busy loop may take to do to its network what another thread asks for."""


class NetworkControl:
    """Trouble on demand between the hosts of a swarm whose client is connected.

    Every method is safe to call from any thread, has taken effect when it returns, and raises
    UsageError for a host that does not exist. What each does: see `LoopbackNetwork`.
    """

    def __init__(self, network: LoopbackNetwork, hosts: Sequence[str]) -> None:
        self._network = network
        self._hosts = tuple(hosts)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread: int | None = None

    def __repr__(self) -> str:
        return f"<NetworkControl of {', '.join(self._hosts)}>"

    def attach(self) -> None:
        """Act on the running loop, which the network belongs to."""
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()

    def detach(self) -> None:
        """Act no more: the network is over."""
        self._loop = None

    def set_link(self, source: str, target: str, link: Link) -> None:
        """Change delay, bandwidth and losses of one direction."""
        self._run((source, target), lambda: self._network.set_link(source, target, link))

    def partition(self, a: str, b: str) -> None:
        """Let nothing through between two hosts."""
        self._run((a, b), lambda: self._network.partition(a, b))

    def heal(self, a: str, b: str) -> None:
        """End a partition."""
        self._run((a, b), lambda: self._network.heal(a, b))

    def kill(self, host: str) -> None:
        """End a host like `kill -9`; it does not come back."""
        self._run((host,), lambda: self._network.kill(host))

    def pause(self, host: str) -> None:
        """Stop a host like SIGSTOP."""
        self._run((host,), lambda: self._network.pause(host))

    def resume(self, host: str) -> None:
        """Let a paused host go on."""
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
