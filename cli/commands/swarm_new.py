"""`shoal swarm-new`: make the join code of a new swarm, or from one code another."""

import argparse
import os
import secrets
import shlex
import sys
from pathlib import Path

from ...protocol.errors import UsageError
from ...protocol.membership.join_code import JoinCode
from ...protocol.membership.membership import (
    SECRET_BYTES,
    SWARM_ID_BYTES,
    Membership,
    Role,
    make_owner,
    make_public,
)
from ..options.join_options import read_join
from ..options.shared_options import add_initial_peers_argument
from ..terminal.terminal import Terminal

_MEANINGS = {
    Role.USE: "its holders can use the swarm but not serve",
    Role.SERVE: "its holders can use the swarm and serve blocks",
    Role.OWN: "this is the owner's code, which can also revoke peers and make all other codes; "
    "keep it secret",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shoal swarm-new`."""
    parser.description = (
        "Create the join code of a new swarm, private by default, or with --from a code with fewer "
        "rights. No peer is started: start the first one with `shoal serve MODEL --new-swarm "
        "--join @FILE` and a code that may serve."
    )
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--public", action="store_true", help="a swarm that anyone can join")
    kind.add_argument(
        "--from", dest="source", metavar="CODE",
        help="derive another code for the swarm of this code (@FILE reads it from a file)",
    )  # fmt: skip
    parser.add_argument(
        "--role", choices=[str(role) for role in Role],
        help="rights of its holders (default: own for a new swarm, use with --from)",
    )  # fmt: skip
    add_initial_peers_argument(parser, "address to put into the code")
    parser.add_argument(
        "--out", type=Path, metavar="FILE",
        help="write the code to a new file that only you can read, and do not print it",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Print one join code, and on stderr what its holders may do; return 0."""
    if options.out is None and sys.__stdout__ is None:  # started with `>&-`
        raise UsageError("there is no stdout to print the code to; use --out FILE")
    code = _make_code(options)
    membership = code.membership
    if options.out is not None:
        _write(options.out, str(code))
    if options.json:
        facts = {
            "join": None if options.out else str(code),
            "swarm_id": membership.swarm_id.hex(),
            "role": str(membership.role),
            "private": membership.is_private,
            "addresses": list(code.addresses),
        }
        Terminal(sys.stdout).print_json(facts)
        return 0
    if options.out is None:
        Terminal(sys.stdout).print(str(code))
    notices = Terminal(sys.stderr)
    for line in notices.wrap(_describe(membership, options.out)):
        notices.print(line)
    return 0


def _describe(membership: Membership, path: Path | None) -> str:
    """Return what was made, and what its holders may do with it."""
    if path is not None and membership.role is Role.OWN:
        return (
            f"Wrote the owner's code of {membership} to {path}. Keep it secret, and off the peers. "
            f"Make their code: shoal swarm-new --from @{shlex.quote(str(path))} --role serve --out "
            "serve.code"
        )
    what = f"Join code of {membership}" + (f", written to {path}" if path else "")
    meaning = _MEANINGS[membership.role] if membership.is_private else "anyone can join with it"
    return f"{what}: {meaning}."


def _write(path: Path, code: str) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(f"{code}\n")
    except FileExistsError as error:
        # It may be the only copy of another swarm's code.
        raise UsageError(f"{path} already exists; choose a new file") from error
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error


def _make_code(options: argparse.Namespace) -> JoinCode:
    if options.source is None:
        membership = _make_new(is_private=not options.public)
        if options.public and options.role is not None:
            raise UsageError("a public swarm has no roles; leave out --role or --public")
        role = options.role or membership.role
        return JoinCode(membership.as_role(Role(role)), tuple(options.initial_peers))
    source = JoinCode.parse(read_join(options.source))
    addresses = tuple(options.initial_peers) or source.addresses
    return JoinCode(source.membership.as_role(Role(options.role or Role.USE)), addresses)


def _make_new(is_private: bool) -> Membership:
    if is_private:
        return make_owner(secrets.token_bytes(SECRET_BYTES))
    return make_public(secrets.token_bytes(SWARM_ID_BYTES))
