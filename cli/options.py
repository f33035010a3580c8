"""Options that several commands have."""

import argparse

from ..peer.config import PeerConfig
from .bundled_model import BUNDLED_NAME


def add_optional_model_argument(parser: argparse.ArgumentParser) -> None:
    """Declare the model that a command works with, the bundled one by default."""
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", default=BUNDLED_NAME,
        help="model directory, or its id on the Hub (default: %(default)s, which comes with shoal)",
    )  # fmt: skip


def add_weights_argument(parser: argparse.ArgumentParser) -> None:
    """Declare how peers hold their weights."""
    parser.add_argument(
        "--weights", choices=("int8", "bf16", "fp32"), default=PeerConfig(model="").weights,
        help="how weights are held (default: %(default)s)",
    )  # fmt: skip
