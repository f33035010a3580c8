"""Options that name the swarm to join, by a join code or by addresses of its peers."""

import argparse
import contextlib
import os
import re
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...peer.process.identity_file import check_private
from ...protocol.errors import UsageError
from ...protocol.membership.join_code import MAX_CODE_CHARACTERS, JoinCode
from ...protocol.membership.membership import Membership
from ...protocol.net.dht.known_addresses import AddressFolder, load_swarm
from ...protocol.net.libp2p.multiaddrs import PeerAddress
from .shared_options import add_initial_peers_argument

_RECENT_SECONDS = 24 * 3600.0
_MOST_ADDRESSES = 3
"""Of the last swarm that are told."""

_MODEL, _CODE = re.compile(r"(`shoal [a-z]+ )MODEL\b"), re.compile(r"(`shoal [^`]*)--join CODE")
"""Placeholders in commands of advice."""

VARIABLE = "SHOAL_JOIN"
"""Holds a code that neither the process list nor the history of a shell should show."""


@dataclass(frozen=True)
class Joining:
    """The swarm that a command line names: the options as given, and as read."""

    join: str = field(repr=False)
    """The code, or empty."""
    initial_peers: tuple[str, ...]
    membership: Membership | None
    """The swarm of the code; None without one."""
    addresses: tuple[str, ...]
    """Addresses to join it through."""


def add_join_arguments(
    parser: argparse._ActionsContainer,  # pyright: ignore[reportPrivateUsage]
    addresses_help: str = "address of a peer, as printed by `shoal serve` and `shoal swarm`",
    addresses_group: argparse._ActionsContainer | None = None,  # pyright: ignore[reportPrivateUsage]
) -> None:
    """Declare --join and --initial-peers."""
    parser.add_argument(
        "--join", metavar="CODE",
        help="join code (shoal:…), or @FILE to read it from a file; without this and "
        f"--initial-peers, the variable {VARIABLE} is read. A file or the variable keeps the code "
        "out of the process list",
    )  # fmt: skip
    add_initial_peers_argument(addresses_group or parser, addresses_help)


def read_joining(options: argparse.Namespace, alternative: str = "") -> Joining:
    """Return the swarm that a command is to join; raises UsageError, with advice, without one.

    There is no default swarm: users join only swarms that they name.
    """
    join = read_join(options.join)
    if not join and not options.initial_peers:
        join = _read_variable()
    if not join and not options.initial_peers:
        raise UsageError(
            "no swarm is given: pass --join CODE, the code that `shoal serve MODEL --new-swarm` "
            f"printed, or --initial-peers ADDRESS, the address of any peer{alternative}"
        )
    membership, addresses = load_swarm(join, options.initial_peers)
    for address in addresses:
        PeerAddress.parse(address)  # now, and not behind seconds of imports
    return Joining(join, tuple(options.initial_peers), membership, addresses)


def choose_swarm(options: argparse.Namespace) -> tuple[Membership | None, tuple[str, ...]]:
    """Return the swarm to serve, and where to join it; nowhere for one that begins here."""
    if not options.new_swarm:
        joining = read_joining(options, ", or start a new swarm with --new-swarm")
        return joining.membership, joining.addresses
    code = read_join(options.join)
    return (JoinCode.parse(code).membership if code else None), ()


def list_addresses_of_new(options: argparse.Namespace) -> tuple[str, ...]:
    """Return where a swarm that is to begin would live already, by its code."""
    code = read_join(options.join) if options.new_swarm else ""
    return JoinCode.parse(code).addresses if code else ()


def describe_last_swarm() -> dict[str, object]:
    """Return where this machine was in a swarm with others within a day, empty if it was not."""
    addresses, kept_at = AddressFolder().find_last()
    if not addresses or time.time() - kept_at > _RECENT_SECONDS:
        return {}
    texts = [one.text for one in addresses[:_MOST_ADDRESSES]]
    return {"addresses": texts, "kept_at": round(kept_at, 3)}


def _read_variable() -> str:
    try:
        return read_join(os.environ.get(VARIABLE) or None)
    except UsageError as error:
        raise UsageError(f"{VARIABLE}: {error}") from error


def read_join(given: str | None) -> str:
    """Return the join code of an option, read from a file if it names one; empty without one.

    Raises UsageError for an invalid code, and for a file that cannot be read or is not private.
    """
    if given is None:
        return ""
    if given.startswith("@"):
        return _read_file(Path(given[1:]))
    JoinCode.parse(given)
    return given


def quote_swarm(addresses: Sequence[str], code: str | None) -> str:
    """Return the options that name a swarm, to be printed; a code that is secret is not shown.

    All addresses are named, for nobody knows which one answers next time. Empty where the
    environment variable names the swarm.

    >>> quote_swarm(["/ip4/a", "/ip4/b"], None), quote_swarm([], "@own.code")
    ('--initial-peers /ip4/a /ip4/b', '--join @own.code')
    """
    words: list[str] = []
    if code is not None:
        words += ["--join", shlex.quote(code) if _may_be_shown(code) else "shoal:…"]
    if addresses:
        words += ["--initial-peers", *addresses]
    return " ".join(words)


def fill_in(advice: str, options: argparse.Namespace) -> str:
    """Return advice with the model and the swarm of a command line in place of MODEL and CODE.

    What the command line does not name stays.

    >>> given = argparse.Namespace(model="my model", initial_peers=["/ip4/a"], join=None)
    >>> fill_in("run `shoal doctor MODEL --join CODE`", given)
    "run `shoal doctor 'my model' --initial-peers /ip4/a`"
    """
    model, join = getattr(options, "model", None), getattr(options, "join", None)
    if model is not None:
        advice = _MODEL.sub(lambda found: found[1] + shlex.quote(model), advice)
    addresses = getattr(options, "initial_peers", ())
    with contextlib.suppress(UsageError):  # the code may be what is wrong
        if swarm := quote_swarm(addresses, join):
            advice = _CODE.sub(lambda found: found[1] + swarm, advice)
    return advice


def _may_be_shown(code: str) -> bool:
    """Return whether the value of --join tells no secret: a file, or the code of a public swarm."""
    return code.startswith("@") or not JoinCode.parse(code).membership.is_private


def quote_command(command: str, addresses: Sequence[str], code: str | None) -> str:
    """Return a command, to be printed, in the swarm as it was given.

    >>> quote_command("shoal generate m --adapter out", ["/ip4/a"], None)
    'shoal generate m --adapter out --initial-peers /ip4/a'
    """
    return f"{command} {quote_swarm(addresses, code)}".rstrip()


def _read_file(path: Path) -> str:
    try:
        with path.open(encoding="ascii", errors="replace") as file:
            code, mode = file.read(MAX_CODE_CHARACTERS + 1), os.fstat(file.fileno()).st_mode
    except OSError as error:
        raise UsageError(f"cannot read a join code from {path}: {error.strerror}") from error
    if not code.strip():
        raise UsageError(f"cannot read a join code from {path}: the file is empty")
    JoinCode.parse(code)
    check_private(path, mode, "join code in")
    return code
