"""How the owner of a peer controls it, built once from the command line."""

from dataclasses import dataclass, field

from .schedule import Schedule


@dataclass(frozen=True)
class TcpAccess:
    """Where tools on other machines reach a peer, and what they have to know."""

    address: str
    """HOST:PORT; port 0: any free one."""

    certificate: bytes
    """PEM, with the chain above it."""

    key: bytes = field(repr=False)
    """PEM."""

    token: str = field(repr=False)
    """What tools send as `authorization: Bearer TOKEN`."""


@dataclass(frozen=True)
class OperatorConfig:
    """How the owner of a peer controls it."""

    has_socket: bool = True
    """Whether tools of the same user on this machine control the peer, by a Unix socket."""

    tcp: TcpAccess | None = None
    """How others do; None: not at all."""

    schedule: Schedule = field(default_factory=Schedule)
    """When the peer serves."""
