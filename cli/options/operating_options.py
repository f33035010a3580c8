"""Options that say how the owner of a peer controls it, and when it serves."""

import argparse
import os
import ssl
from pathlib import Path

from ...peer.operating.operator_config import OperatorConfig, TcpAccess
from ...peer.operating.schedule import Hours, Schedule
from ...peer.process.identity_file import check_private
from ...protocol.errors import UsageError
from .quantities import parse_bytes, parse_listen, parse_positive

_LEAST_TOKEN_CHARACTERS = 16


def add_operating_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare --hours, --pause-on-battery, --operator and what belongs to it."""
    parser.add_argument(
        "--hours", type=parse_hours, action="append", default=[], metavar="HH:MM-HH:MM",
        help="serve at these hours of the day only, in local time, such as 22:00-07:00; may be "
        "given more than once. At other times the peer is drained, with its blocks in memory",
    )  # fmt: skip
    parser.add_argument(
        "--pause-on-battery", action="store_true",
        help="drain the peer while this machine runs on its battery",
    )  # fmt: skip
    parser.add_argument(
        "--pause-when-busy", type=parse_positive, default=0.0, metavar="CORES",
        help="drain the peer while other programs keep more cores of this machine busy, on average "
        "of a minute, such as 0.5 (default: never)",
    )  # fmt: skip
    for name, what in (("--upload", "sends"), ("--download", "receives")):
        parser.add_argument(
            name, type=parse_bytes, default=0, metavar="BYTES",
            help=f"drain the peer while it {what} more bytes a second, on average of a minute, "
            "such as 2M (default: no limit)",
        )  # fmt: skip
    parser.add_argument(
        "--no-operator", action="store_true",
        help="no Unix socket for `shoal peers`, `shoal drain` and other tools of this user",
    )  # fmt: skip
    parser.add_argument(
        "--operator", metavar="HOST:PORT",
        help="serve such tools over TCP as well, by gRPC: needs the three options below",
    )  # fmt: skip
    parser.add_argument(
        "--operator-certificate", type=Path, metavar="FILE", help="TLS certificate, in PEM"
    )
    parser.add_argument("--operator-key", type=Path, metavar="FILE", help="its private key, in PEM")
    parser.add_argument(
        "--operator-token", type=Path, metavar="FILE",
        help="file with the token that tools send as `authorization: Bearer TOKEN`",
    )  # fmt: skip


def read_operator_config(options: argparse.Namespace) -> OperatorConfig:
    """Return how the peer is controlled; raises UsageError for files that cannot be used."""
    schedule = Schedule(
        tuple(options.hours),
        options.pause_on_battery,
        options.pause_when_busy,
        options.upload,
        options.download,
    )
    return OperatorConfig(not options.no_operator, _read_tcp(options), schedule)


def _read_tcp(options: argparse.Namespace) -> TcpAccess | None:
    paths = (options.operator_certificate, options.operator_key, options.operator_token)
    if options.operator is None:
        if any(paths):
            raise UsageError("--operator-certificate, -key and -token need --operator HOST:PORT")
        return None
    if not all(paths):
        raise UsageError(
            "--operator is for TLS with a token only: give --operator-certificate, --operator-key "
            "and --operator-token"
        )
    host, port = parse_listen(options.operator)
    _check_pair(options.operator_certificate, options.operator_key)
    certificate = _read_file(options.operator_certificate, "certificate", is_secret=False)
    key = _read_file(options.operator_key, "key", is_secret=True)
    token = _read_file(options.operator_token, "token", is_secret=True).decode("ascii", "replace")
    if len(token.strip()) < _LEAST_TOKEN_CHARACTERS or len(token.split()) != 1:
        raise UsageError(
            f"{options.operator_token} is no token: use {_LEAST_TOKEN_CHARACTERS} characters or "
            "more without spaces, such as those of `openssl rand -hex 32`"
        )
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return TcpAccess(address, certificate, key, token.strip())


def _check_pair(certificate: Path, key: Path) -> None:
    """Raise UsageError unless a certificate and a key, both in PEM, belong together."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key, password=lambda: b"")  # or it would ask for one
    except FileNotFoundError:
        return  # which one is told when it is read
    except OSError as error:
        raise UsageError(
            f"{certificate} and {key} are not a TLS certificate and its key, in PEM and without a "
            "password"
        ) from error


def _read_file(path: Path, what: str, is_secret: bool) -> bytes:
    try:
        with path.open("rb") as file:
            content, mode = file.read(2**16), os.fstat(file.fileno()).st_mode
    except OSError as error:
        raise UsageError(f"cannot read the operator's {what} {path}: {error.strerror}") from error
    if is_secret:
        check_private(path, mode, f"operator's {what}")
    return content


def parse_hours(text: str) -> Hours:
    """Read hours of the day."""
    try:
        return Hours.parse(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
