"""Where a swarm was last reached, kept in a file: initial peers may be gone at the next start."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ...endpoints import is_loopback
from ...errors import UsageError
from ...ids import PeerId
from ...membership.join_code import JoinCode, parse_join_arguments
from ...membership.membership import Membership, make_public
from ..addresses import list_own_hosts
from ..libp2p.multiaddrs import PeerAddress, split_multiaddr

_logger = logging.getLogger(__name__)

_MAX_ADDRESSES = 32
_MAX_BYTES = 2**14
_MAX_FILES = 64
"""Swarms that are remembered; the ones that were used longest ago are forgotten."""


@dataclass(frozen=True)
class AddressFolder:
    """A folder with one file for each swarm. Nothing in it is secret."""

    path: Path = Path("~/.cache/shoal/swarms")

    def find(
        self, membership: Membership | None, initial_peers: Sequence[str]
    ) -> KnownAddresses | None:
        """Return the addresses of a swarm: of a membership, else of the one behind some peers.

        Those that only this machine can dial are kept and read where a swarm is joined through this
        machine, or through nobody as a member: from elsewhere, a stranger could have us dial what
        else runs here. Of a swarm on this machine that has no join code, as in a demo, nothing is
        kept: nobody comes back to it, and its file would displace that of another swarm.
        """
        is_here = all(is_loopback(split_multiaddr(text)[0]) for text in initial_peers)
        if is_here and membership is None:
            return None
        text = "\n".join(sorted(initial_peers)).encode()
        name = membership.swarm_id.hex() if membership else hashlib.sha256(text).hexdigest()
        return KnownAddresses(self.path.expanduser() / name[:32], is_here)

    def find_last(self) -> tuple[list[PeerAddress], float]:
        """Return where the swarm of the last time was joined, and when that was written down.

        None but addresses that other machines may have.
        """
        try:
            files = sorted(
                (file.stat().st_mtime, file) for file in self.path.expanduser().iterdir()
            )
            kept_at, file = files[-1]
        except (OSError, RuntimeError, IndexError):
            return [], 0.0
        _, addresses = KnownAddresses(file, keeps_loopback=False).load()
        own_hosts = list_own_hosts("0.0.0.0")
        return [one for one in addresses if one.host not in own_hosts], kept_at


def load_swarm(
    join: str, initial_peers: Sequence[str]
) -> tuple[Membership | None, tuple[str, ...]]:
    """Return the swarm of a code, "" for none, or of addresses, and where to join it.

    One whose code names no address is looked for where this machine last met it. Raises what
    `parse_join_arguments` does.
    """
    code = JoinCode.parse(join) if join and not initial_peers else None
    known = None
    if code is not None and not code.addresses:
        known = AddressFolder().find(code.membership, ())
    found = [] if known is None else [address.text for address in known.load()[1]]
    return parse_join_arguments(join, found or initial_peers)


class KnownAddresses:
    """The addresses of one swarm. Without a disk to keep them on, there are none."""

    def __init__(self, path: Path, keeps_loopback: bool) -> None:
        self._path = path
        self._keeps_loopback = keeps_loopback

    def load(self) -> tuple[bytes, list[PeerAddress]]:
        """Return the id of the swarm and its addresses; none where nothing valid was kept."""
        try:
            with self._path.open(encoding="ascii") as file:
                swarm_id, *lines = file.read(_MAX_BYTES).splitlines()
            addresses = [PeerAddress.parse(line) for line in lines[:_MAX_ADDRESSES]]
            return make_public(bytes.fromhex(swarm_id)).swarm_id, [*filter(self._keeps, addresses)]
        except (OSError, ValueError, UsageError) as error:
            _logger.debug("no known addresses of the swarm in %s: %s", self._path, error)
            return b"", []

    def save(self, swarm_id: bytes, addresses: Sequence[PeerAddress]) -> None:
        """Keep addresses, one of each peer, in place of those before, if there are any.

        Strangers name them: so the id of the swarm is kept, which a peer there has to be in.
        """
        kept: dict[PeerId, str] = {}
        for one in addresses:
            if self._keeps(one):
                kept.setdefault(one.peer_id, one.text)
        if not kept:
            return
        text = "\n".join([swarm_id.hex(), *list(kept.values())[:_MAX_ADDRESSES]])
        written: Path | None = None
        try:
            folder = self._path.parent
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
                written = Path(file.name)
                file.write(text)
            os.replace(file.name, self._path)
            with suppress(FileNotFoundError):  # another process of this user does the same
                for old in sorted(folder.iterdir(), key=lambda one: one.stat().st_mtime)[
                    :-_MAX_FILES
                ]:
                    old.unlink()
        except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
            _logger.warning("cannot keep the addresses of the swarm: %s", error)
            if written is not None:
                written.unlink(missing_ok=True)

    def _keeps(self, address: PeerAddress) -> bool:
        return self._keeps_loopback or not address.is_loopback
