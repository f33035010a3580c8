"""`shoal revoke`: remove peers from a private swarm, by their ids."""

import argparse
import asyncio
import sys
from typing import TYPE_CHECKING

from ...protocol.errors import RemoteProtocolError, UsageError
from ...protocol.identity import public_key_of
from ...protocol.ids import PeerId
from ...protocol.net.clock import SystemClock
from ..options.join_options import Joining, add_join_arguments, read_joining
from ..terminal.interrupts import quitting_at_once
from ..terminal.terminal import Progress, Terminal

if TYPE_CHECKING:
    from ...protocol.membership.membership import Revocations


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shoal revoke`."""
    parser.description = (
        "Remove peers from a private swarm, with its owner's code: members ignore announcements of "
        "revoked peers. The holder of a code that can serve may return with a new peer id; if a "
        "code has leaked, start a new swarm."
    )
    parser.add_argument(
        "peers", metavar="PEER_ID", nargs="*", help="12D3KooW…; without any, list revoked peers"
    )
    add_join_arguments(parser, "address of any peer of the swarm")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Revoke the given peers and print all revoked ones; return 0."""
    peer_ids = [_read_peer_id(text) for text in options.peers]
    joining = read_joining(options)
    with Progress(Terminal(sys.stderr), lambda: "Joining the swarm"):
        revocations = asyncio.run(_revoke(joining, peer_ids))
    revoked = sorted(revocations.peer_ids)
    output = Terminal(sys.stdout)
    if options.json:
        output.print_json({"sequence": revocations.sequence, "revoked": revoked})
    elif not revoked:
        output.print("No peer is revoked.")
    else:
        output.print("Revoked:")
        for peer_id in revoked:
            output.print(f"  {peer_id}")
    return 0


def _read_peer_id(text: str) -> PeerId:
    try:
        public_key_of(text)
    except RemoteProtocolError as error:
        raise UsageError(f"{error}; a peer prints its id, 12D3KooW…, when it starts") from error
    return PeerId(text)


async def _revoke(joining: Joining, peer_ids: list[PeerId]) -> "Revocations":
    membership = joining.membership
    if membership is None or not membership.is_private:
        raise UsageError("only private swarms can revoke; give the owner's code with --join")
    if peer_ids:
        membership.sign_as_owner(b"")  # fails without the owner's key, before the swarm is joined
    with quitting_at_once():
        from ...protocol.net.dht.hivemind_directory import HivemindDirectory
    directory = await HivemindDirectory.join(
        joining.addresses,
        identity=None,
        clock=SystemClock(),
        client_mode=True,
        membership=membership,
    )
    try:
        return await directory.revoke(peer_ids)
    finally:
        await directory.close()
