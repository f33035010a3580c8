"""Options that say where a peer listens, and whom it carries."""

import argparse

from ...protocol.endpoints import is_loopback
from ...protocol.errors import UsageError
from ...protocol.net.addresses import EVERYWHERE
from ...protocol.net.libp2p.multiaddrs import PeerAddress
from .quantities import parse_host, parse_listen, parse_port


def add_listen_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare --listen, --local, --announce-host, --directory-port, --port-mapping and --relay."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--listen", metavar="HOST[:PORT]",
        help="address that accepts sessions (default: every address of this machine, any free "
        "port)",
    )  # fmt: skip
    where.add_argument(
        "--local", dest="listen", action="store_const", const="127.0.0.1",
        help="serve this machine only: no other one can join or use the swarm. The default where "
        "all addresses of the swarm to join are of this machine",
    )  # fmt: skip
    parser.add_argument(
        "--announce-host", type=parse_host, metavar="HOST",
        help="host that clients and other peers dial (default: the addresses of this machine, and "
        "the one at which others reach it)",
    )  # fmt: skip
    parser.add_argument(
        "--directory-port",
        type=parse_port,
        default=0,
        metavar="PORT",
        help="port of the DHT (default: any free port)",
    )
    parser.add_argument(
        "--port-mapping", action="store_true",
        help="ask the router, by UPnP, to forward the ports of this peer while it runs",
    )  # fmt: skip
    parser.add_argument(
        "--relay", action=argparse.BooleanOptionalAction, default=True,
        help="carry the sessions of peers that nobody can dial, such as those behind a NAT "
        "(default: yes, where this peer can be dialled)",
    )  # fmt: skip


def choose_place(options: argparse.Namespace, initial_peers: tuple[str, ...]) -> tuple[str, int]:
    """Return where to listen: on this machine only where the whole swarm is."""
    are_here = [PeerAddress.parse(text).is_loopback for text in initial_peers]
    host, port = "127.0.0.1" if are_here and all(are_here) else EVERYWHERE[0], 0
    if options.listen is not None:
        host, port = parse_listen(options.listen)
    if is_loopback(host) and options.port_mapping:
        raise UsageError(
            f"a peer that listens on {host} serves this machine only, where no router forwards "
            f"ports to: leave out --port-mapping, or give --listen {EVERYWHERE[0]}"
        )
    if options.listen is None:
        return host, port
    if is_loopback(host) and not all(are_here) and options.announce_host is None:
        raise UsageError(
            f"a peer that listens on {host} serves this machine only, and the swarm is open to "
            "others, which could not use it: leave out --local or --listen"
        )
    return host, port
