"""Real networks with NAT on this machine: network namespaces, veth pairs and iptables.

    home a ────── router a ──┐                       ┌── router b ── home b
    10.0.1.2  │    (NAT)     └──── public network ───┘    (NAT)   10.0.2.2
    neighbour a                    198.51.100.1
    10.0.1.3

Nothing outside the namespaces is touched: they hold the public network as well.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator

import pytest

PUBLIC_HOST = "198.51.100.1"
ROUTER_HOSTS = {"a": "198.51.100.2", "b": "198.51.100.3"}
_numbers = itertools.count(1)  # of the networks of this process
HOME_HOSTS = {"a": "10.0.1.2", "b": "10.0.2.2"}
NEIGHBOUR_HOST = "10.0.1.3"


class NatNetworks:
    """The namespaces, by short names: `public`, `router-a`, `home-a`, and so on."""

    def __init__(self) -> None:
        self._prefix = f"shoal-{os.getpid()}-{next(_numbers)}-"
        self._names = ["public", "router-a", "home-a", "neighbour-a", "router-b", "home-b"]

    def make(self) -> None:
        for name in self._names:
            _run("ip", "netns", "add", self._prefix + name)
            self._ip(name, "link set lo up")
        self._ip("public", "link add public type bridge")
        self._ip("public", "link set public up")
        self._ip("public", f"addr add {PUBLIC_HOST}/24 dev public")
        for letter in HOME_HOSTS:
            self._make_home(letter)

    def remove(self) -> None:
        for name in self._names:
            subprocess.run(["ip", "netns", "del", self._prefix + name], capture_output=True)

    def command(self, name: str, *command: str) -> list[str]:
        """Return a command as it runs inside a namespace; it replaces `ip`, under its pid."""
        return ["ip", "netns", "exec", self._prefix + name, *command]

    @contextlib.contextmanager
    def count_bytes(self, letter: str, endpoint: str) -> Iterator[Callable[[], int]]:
        """Give what counts the bytes that come from an endpoint into a home."""
        router, (host, port) = f"router-{letter}", endpoint.rsplit(":", 1)
        rule = f"FORWARD -i wan -p tcp -s {host} --sport {port}".split()
        _run(*self.command(router, "iptables", "-I", *rule))

        def count() -> int:
            listed = _run(*self.command(router, "iptables", "-L", "FORWARD", "-v", "-n", "-x"))
            (line,) = (line for line in listed.splitlines() if line.endswith(f"spt:{port}"))
            return int(line.split()[1])

        try:
            yield count
        finally:
            _run(*self.command(router, "iptables", "-D", *rule))

    @contextlib.contextmanager
    def forward(self, letter: str, port: int) -> Iterator[None]:
        """Have a router let a port through to its home."""
        router, home = f"router-{letter}", HOME_HOSTS[letter]
        rules = (
            f"-t nat {{}} PREROUTING -i wan -p tcp --dport {port} -j DNAT --to {home}",
            f"{{}} FORWARD -i wan -p tcp -d {home} --dport {port} -j ACCEPT",
        )
        for rule in rules:
            _run(*self.command(router, "iptables", *rule.format("-I").split()))
        try:
            yield
        finally:
            for rule in rules:
                _run(*self.command(router, "iptables", *rule.format("-D").split()))

    def cut_off(self, letter: str) -> None:
        """Have a router carry nothing between its home and the public network any more."""
        for side in ("-o wan -s", "-i wan -d"):
            rule = f"-I FORWARD {side} {HOME_HOSTS[letter]} -j DROP"
            _run(*self.command(f"router-{letter}", "iptables", *rule.split()))

    def add_address(self, name: str, host: str) -> None:
        """Give a machine of the public network an address there."""
        self._ip(name, f"addr add {host}/24 dev {_find_device(name)}")

    def remove_address(self, name: str, host: str) -> None:
        """Take it away; no connection that uses it is told."""
        self._ip(name, f"addr del {host}/24 dev {_find_device(name)}")

    def forget_after(self, letter: str, seconds: int) -> None:
        """Have a NAT forget connections over which nothing went for so long."""
        path = "/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_established"
        _run(*self.command(f"router-{letter}", "sh", "-c", f"echo {seconds} > {path}"))

    def _make_home(self, letter: str) -> None:
        router = f"router-{letter}"
        gateway = HOME_HOSTS[letter].removesuffix("2") + "1"
        self._ip(
            "public", f"link add to-{letter} type veth peer name wan netns {self._prefix}{router}"
        )
        self._ip("public", f"link set to-{letter} master public up")
        self._ip(router, f"addr add {ROUTER_HOSTS[letter]}/24 dev wan")
        self._ip(router, "link set wan up")
        self._ip(router, "link add lan type bridge")
        self._ip(router, f"addr add {gateway}/24 dev lan")
        self._ip(router, "link set lan up")
        machines = {f"home-{letter}": HOME_HOSTS[letter]}
        machines |= {"neighbour-a": NEIGHBOUR_HOST} if letter == "a" else {}
        for name, host in machines.items():
            port = f"to-{name}"
            self._ip(router, f"link add {port} type veth peer name eth0 netns {self._prefix}{name}")
            self._ip(router, f"link set {port} master lan up")
            self._ip(name, f"addr add {host}/24 dev eth0")
            self._ip(name, "link set eth0 up")
            self._ip(name, f"route add default via {gateway}")
        forwarding = "echo 1 > /proc/sys/net/ipv4/ip_forward"
        _run(*self.command(router, "sh", "-c", forwarding))
        for rule in (
            "-t nat -A POSTROUTING -o wan -j MASQUERADE",
            "-A FORWARD -i wan -m state --state NEW -j DROP",
        ):
            _run(*self.command(router, "iptables", *rule.split()))

    def _ip(self, name: str, words: str) -> None:
        _run("ip", "-n", self._prefix + name, *words.split())


def _find_device(name: str) -> str:
    return "public" if name == "public" else "wan"


@contextlib.contextmanager
def nat_networks() -> Iterator[NatNetworks]:
    """Make the networks for as long as it lasts; skip the test where that is impossible."""
    missing = [tool for tool in ("ip", "iptables") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"networks with NAT need {' and '.join(missing)}")
    networks = NatNetworks()
    try:
        try:
            networks.make()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no networks with NAT here: {error.cmd}: {error.stderr.strip()}")
        yield networks
    finally:
        networks.remove()


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
