"""Options that several commands have."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from ...peer.engine.devices.device_names import NO_NF4, parse_cuda_number
from ...peer.process.config import WEIGHT_FORMATS, PeerConfig
from ...protocol.errors import UsageError
from .bundled_model import BUNDLED_NAME
from .quantities import parse_announce_period, parse_metrics, parse_non_negative

_INITIAL_PEERS = "--initial-peers"
_ADDRESS_BEGINNINGS = ("/ip4/", "/ip6/", "/dns")


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """Declare the model that a command works with."""
    parser.add_argument(
        "model", metavar="MODEL",
        help=f"model directory, Hub id, or {BUNDLED_NAME}, which comes with shoal",
    )  # fmt: skip


def add_optional_model_argument(parser: argparse.ArgumentParser) -> None:
    """Declare the model that a command works with, the bundled one by default."""
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", default=BUNDLED_NAME,
        help="model directory or Hub id (default: %(default)s, which comes with shoal)",
    )  # fmt: skip


def add_wait_argument(parser: argparse.ArgumentParser, seconds: float) -> None:
    """Declare how long a command waits for blocks, by default some seconds."""
    parser.add_argument(
        "--wait", type=parse_non_negative, default=seconds, metavar="SECONDS",
        help=f"maximum wait for blocks that no peer serves (default: {seconds:g})",
    )  # fmt: skip


def add_identity_argument(
    parser: argparse.ArgumentParser,
    help_text: str = "file with the private key behind the peer's id; created if missing",
) -> None:
    """Declare the file of the key of a peer."""
    parser.add_argument("--identity", type=Path, metavar="FILE", help=help_text)


def add_announce_period_argument(parser: argparse.ArgumentParser) -> None:
    """Declare how often a peer announces what it does."""
    parser.add_argument(
        "--announce-period", type=parse_announce_period,
        default=PeerConfig(model="").announce_period_seconds, metavar="SECONDS",
        help="interval between announcements (default: %(default)s)",
    )  # fmt: skip


def add_metrics_argument(parser: argparse.ArgumentParser) -> None:
    """Declare where a peer serves its metrics."""
    parser.add_argument(
        "--metrics", type=parse_metrics, metavar="[HOST:]PORT",
        help="serve Prometheus metrics there, at /metrics (default host: 127.0.0.1)",
    )  # fmt: skip


def add_weights_argument(parser: argparse.ArgumentParser, *, has_device: bool = False) -> None:
    """Declare how peers hold their weights; `has_device`: not all of them compute on CPUs."""
    parser.add_argument(
        "--weights", type=str if has_device else parse_weights, choices=WEIGHT_FORMATS,
        default=PeerConfig(model="").weights,
        help="format of the weights in memory (default: %(default)s)",
    )  # fmt: skip


def parse_weights(text: str) -> str:
    """Refuse nf4, which CPUs cannot compute with; `choices` checks that the format exists."""
    if text == "nf4":
        raise argparse.ArgumentTypeError(NO_NF4)
    return text


def parse_device(text: str) -> str:
    """Refuse a name that no device can have; that the device exists is checked when it is used."""
    try:
        parse_cuda_number(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def add_initial_peers_argument(
    parser: argparse._ActionsContainer,  # pyright: ignore[reportPrivateUsage]
    help_text: str,
) -> None:
    """Declare the addresses to join through: see `join_addresses` for several of them."""
    parser.add_argument(
        _INITIAL_PEERS, type=lambda text: text.split(","), action="extend", default=[],
        metavar="ADDRESS",
        help=f"{help_text}; list several after the option, or repeat it",
    )  # fmt: skip


def join_addresses(words: Sequence[str]) -> list[str]:
    """Return a command line in which several initial peers are one word, with commas.

    An option with any number of words would swallow the prompt behind it.

    >>> join_addresses(["--initial-peers", "/ip4/a", "/ip4/b", "Once upon"])
    ['--initial-peers', '/ip4/a,/ip4/b', 'Once upon']
    """
    joined: list[str] = []
    for index, word in enumerate(words):
        if word == "--":
            return joined + list(words[index:])
        is_next = len(joined) > 1 and _is_initial_peers(joined[-2])
        if is_next and word.startswith(_ADDRESS_BEGINNINGS):
            joined[-1] += f",{word}"
        else:
            joined.append(word)
    return joined


def _is_initial_peers(word: str) -> bool:
    """Return whether a word is the option, or an abbreviation that argparse takes for it."""
    return len(word) > 2 and _INITIAL_PEERS.startswith(word)
