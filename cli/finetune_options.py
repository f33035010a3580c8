"""The options of `shoal finetune`."""

import argparse
from pathlib import Path

from ..protocol.errors import UsageError
from .bundled_model import BUNDLED_NAME
from .joining import add_join_arguments
from .quantities import parse_count, parse_non_negative, parse_part, parse_positive, parse_whole

_METHODS = ("lora", "ptune", "deep_ptune")
RANK = 8
PRE_SEQ_LEN = 16
LEARNING_RATES = {"lora": 1e-3, "ptune": 1e-2, "deep_ptune": 1e-2}
MAX_LENGTH = 512
"""Tokens of a text, unless the model has fewer positions: memory at peers grows with them."""

MOST_BETWEEN_MILESTONES = 100
_WARMUP_FRACTION = 0.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shoal finetune`."""
    parser.add_argument(
        "model", metavar="MODEL",
        help=f"model directory, its id on the Hub, or {BUNDLED_NAME}, which comes with shoal",
    )  # fmt: skip
    parser.add_argument(
        "--data", type=Path, required=True, metavar="FILE",
        help="texts to learn. jsonl: an object in each line, with text, or with prompt and "
        "completion, of which the completion is learned; csv: the same as columns; txt: paragraphs",
    )  # fmt: skip
    parser.add_argument(
        "--method", choices=_METHODS, default="lora",
        help="what learns: an adapter in the format of PEFT (lora), a prompt (ptune), or one for "
        "each block (deep_ptune) (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR",
        help="folder for what was learned, for checkpoints and for the plot of the losses",
    )  # fmt: skip
    parser.add_argument(
        "--resume", action="store_true", help="go on from the newest checkpoint in DIR"
    )
    add_join_arguments(parser, "address of the swarm, as `shoal serve` and `shoal swarm` print it")
    _add_learning_arguments(parser)
    _add_method_arguments(parser)
    parser.add_argument(
        "--wait", type=parse_non_negative, default=120.0, metavar="SECONDS",
        help="wait at most this long for blocks that nobody serves (default: 120)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print events as JSON lines")


def settle_method(options: argparse.Namespace) -> None:
    """Fill in what a method takes and nobody gave; UsageError for what another one takes."""
    of_lora = {"rank": RANK, "alpha": None, "target_modules": []}
    of_prompts = {"pre_seq_len": PRE_SEQ_LEN}
    is_lora = options.method == "lora"
    for name in of_prompts if is_lora else of_lora:
        if getattr(options, name):
            raise UsageError(
                f"--{name.replace('_', '-')} belongs to --method "
                + ("ptune or deep_ptune" if is_lora else "lora")
                + f", and this is {options.method}"
            )
    for name, default in (of_lora | of_prompts).items():
        setattr(options, name, getattr(options, name) or default)


def _add_learning_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("learning")
    length = group.add_mutually_exclusive_group()
    length.add_argument(
        "--epochs", type=parse_positive, default=3.0, metavar="N",
        help="how often to go through the texts (default: 3)",
    )  # fmt: skip
    length.add_argument(
        "--updates", type=parse_count, metavar="N", help="end after N updates instead"
    )
    group.add_argument(
        "--learning-rate", type=parse_positive, metavar="R",
        help="how far each update goes (default: "
        + ", ".join(f"{rate:g} for {method}" for method, rate in LEARNING_RATES.items()) + ")",
    )  # fmt: skip
    group.add_argument(
        "--schedule", choices=("cosine", "linear", "constant"), default="cosine",
        help="how the learning rate falls after it has risen (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--warmup", type=parse_part, default=_WARMUP_FRACTION, metavar="PART",
        help="part of the updates in which it rises (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--batch-size", type=parse_count, default=8, metavar="N",
        help="texts that go through the swarm together (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--accumulate", type=parse_count, default=1, metavar="N",
        help="batches of each update (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--max-length", type=parse_count, metavar="N",
        help=f"cut texts after N tokens (default: {MAX_LENGTH}, or what the model has)",
    )  # fmt: skip
    group.add_argument(
        "--eval", type=parse_part, default=0.05, metavar="PART",
        help="part of the texts that is not learned, to see what others gain; 0 for none "
        "(default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--eval-every", type=parse_count, metavar="N",
        help="updates between evaluations, with a checkpoint at each (default: a tenth of all, "
        f"{MOST_BETWEEN_MILESTONES} at most)",
    )  # fmt: skip
    group.add_argument(
        "--weight-decay", type=parse_non_negative, default=0.0, metavar="D",
        help="how much of what is learned fades (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--clip", type=parse_positive, default=1.0, metavar="NORM",
        help="shorten gradients that are longer (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--seed", type=parse_whole, default=0, metavar="S",
        help="the order of the texts, those for evaluation, and what learning begins with",
    )  # fmt: skip


def _add_method_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what learns")
    group.add_argument("--rank", type=parse_count, metavar="R", help=f"of a lora (default: {RANK})")
    group.add_argument(
        "--alpha", type=parse_positive, metavar="A",
        help="weight of a lora, divided by its rank (default: twice the rank)",
    )  # fmt: skip
    group.add_argument(
        "--target-modules", type=lambda text: text.split(","), default=[], metavar="NAMES",
        help="linears that a lora changes, such as q_proj,v_proj (default: all of the blocks)",
    )  # fmt: skip
    group.add_argument(
        "--optimizer", choices=("client", "peers"), default="client",
        help="where the optimizer of a lora runs; with peers, neither gradients nor what was "
        "learned travel with each update (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--pre-seq-len", type=parse_count, metavar="N",
        help=f"tokens of a prompt that learns (default: {PRE_SEQ_LEN})",
    )  # fmt: skip
