"""The options of `shoal finetune`."""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ...protocol.errors import UsageError
from ..options.join_options import add_join_arguments
from ..options.quantities import (
    parse_count,
    parse_non_negative,
    parse_part,
    parse_positive,
    parse_whole,
)
from ..options.shared_options import add_model_argument, add_wait_argument

LEARNING_RATES = {"lora": 1e-3, "ptune": 1e-2, "deep_ptune": 1e-2}
MAX_LENGTH = 512
"""Tokens of a text, unless the model has fewer positions; memory of peers grows with them."""

MOST_BETWEEN_MILESTONES = 100

_OF_LORA = ("rank", "alpha", "target_modules")
_OF_PROMPTS = ("pre_seq_len",)
"""Sizes that one method has and the others lack."""


class _Option(NamedTuple):
    """An option that checkpoints record."""

    flag: str
    default: Any
    """None where it follows from others."""
    values: Callable[[str], Any] | tuple[str, ...]
    """The parser of a value, or all values."""
    metavar: str | None
    words: str
    """Its help; `{}` stands for the default."""

    def declare(self, group: Any, *, has_default: bool) -> None:
        """Declare it; without its default, which is only named, it is absent unless given."""
        is_choice = isinstance(self.values, tuple)
        group.add_argument(
            self.flag,
            default=self.default if has_default else argparse.SUPPRESS,
            type=str if is_choice else self.values,
            choices=self.values if is_choice else None,
            metavar=self.metavar,
            help=self.words.format(self.default),
        )


_RATES = ", ".join(f"{rate:g} for {method}" for method, rate in LEARNING_RATES.items())

# fmt: off
_METHOD = _Option(
    "--method", "lora", ("lora", "ptune", "deep_ptune"), None,
    "what to train: a LoRA adapter in PEFT format (lora), a soft prompt (ptune), or that and one "
    "more for each block (deep_ptune) (default: {})")
_LENGTH = (
    _Option("--epochs", 3.0, parse_positive, "N",
            "number of passes over the texts (default: {:g})"),
    _Option("--updates", None, parse_count, "N", "stop after N optimizer updates instead"),
)
_TRAINING = (
    _Option("--learning-rate", None, parse_positive, "R",
            f"peak learning rate (default: {_RATES})"),
    _Option("--schedule", "cosine", ("cosine", "linear", "constant"), None,
            "learning rate decay after the warmup (default: {})"),
    _Option("--warmup", 0.05, parse_part, "FRACTION",
            "fraction of the updates used for warmup (default: {})"),
    _Option("--batch-size", 8, parse_count, "N", "texts per batch (default: {})"),
    _Option("--accumulate", 1, parse_count, "N",
            "gradient accumulation: batches per update (default: {})"),
    _Option("--max-length", None, parse_count, "N",
            f"maximum tokens per text (default: {MAX_LENGTH}, or the model's maximum)"),
    _Option("--eval", 0.05, parse_part, "FRACTION",
            "fraction of the texts held out for evaluation; 0 disables evaluation (default: {})"),
    _Option("--eval-every", None, parse_count, "N",
            "updates between evaluations; each also saves a checkpoint (default: a tenth of all "
            f"updates, at most {MOST_BETWEEN_MILESTONES})"),
    _Option("--weight-decay", 0.0, parse_non_negative, "D", "AdamW weight decay (default: {})"),
    _Option("--clip", 1.0, parse_positive, "NORM",
            "clip the global gradient norm to NORM (default: {})"),
    _Option("--seed", 0, parse_whole, "S",
            "random seed for the order of texts, the evaluation split and the initial weights "
            "(default: {})"),
)
_OF_ONE_METHOD = (
    _Option("--rank", 8, parse_count, "R", "LoRA rank (default: {})"),
    _Option("--alpha", None, parse_positive, "A",
            "LoRA alpha; the adapter is scaled by alpha / rank (default: twice the rank)"),
    _Option("--target-modules", [], lambda text: text.split(","), "NAMES",
            "linear layers with LoRA weights, such as q_proj,v_proj (default: all of the blocks)"),
    _Option("--optimizer", "client", ("client", "peers"), None,
            "where the LoRA optimizer runs; with peers, neither gradients nor adapter weights are "
            "transferred at each update (default: {})"),
    _Option("--pre-seq-len", 16, parse_count, "N",
            "length of the soft prompt in tokens (default: {})"),
)
# fmt: on


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shoal finetune`.

    Those that checkpoints record have no defaults before `settle_options`.
    """
    add_model_argument(parser)
    parser.add_argument(
        "--data", type=Path, required=True, metavar="FILE",
        help="training texts. jsonl: one object per line with text, with prompt and completion, "
        "with messages, or with instruction and output; json: a list of them; csv, parquet or a "
        "folder of the library datasets: the same as columns; txt: paragraphs",
    )  # fmt: skip
    _METHOD.declare(parser, has_default=False)
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR",
        help="output folder for the trained weights, checkpoints and loss plot",
    )  # fmt: skip
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue from the newest checkpoint in DIR, with the options of that run",
    )
    add_join_arguments(parser)
    training = parser.add_argument_group("training")
    length = training.add_mutually_exclusive_group()
    of_one_method = parser.add_argument_group("options of one method")
    groups = ((length, _LENGTH), (training, _TRAINING), (of_one_method, _OF_ONE_METHOD))
    for group, options in groups:
        for option in options:
            option.declare(group, has_default=False)
    add_wait_argument(parser, 120.0)
    parser.add_argument("--json", action="store_true", help="print events as JSON lines")


def settle_options(options: argparse.Namespace, recorded: Mapping[str, str]) -> None:
    """Fill in missing options: from the record of the resumed run, else with their defaults.

    `recorded` comes from `record_options`. Raises UsageError for options of another method, and for
    a damaged record.
    """
    given = dict(vars(options))
    former = _read_recorded(recorded)
    if "epochs" in given:
        former.updates = None
    vars(options).update(vars(former) | given)
    if options.updates:
        options.epochs = None
    _check_method(options.method, given)
    options.alpha = options.alpha or 2 * options.rank
    options.learning_rate = options.learning_rate or LEARNING_RATES[options.method]
    if options.optimizer == "peers" and options.method != "lora":
        raise UsageError("--optimizer peers works only with --method lora; leave it out")


def record_options(options: argparse.Namespace) -> dict[str, str]:
    """Return the training options of a run as words of a command line.

    >>> options = argparse.Namespace(method="lora", rank=4, target_modules=["q", "v"])
    >>> record_options(options)
    {'method': 'lora', 'rank': '4', 'target-modules': 'q,v'}
    """
    given = vars(options)
    others = _OF_PROMPTS if options.method == "lora" else _OF_LORA
    values = {name: given.get(name) for name in vars(_read_recorded({})) if name not in others}
    return {
        name.replace("_", "-"): ",".join(value) if isinstance(value, list) else str(value)
        for name, value in values.items()
        if value is not None and value != []
    }


def _read_recorded(recorded: Mapping[str, str]) -> argparse.Namespace:
    """Return the options of a record, with defaults for others; raises UsageError for damage."""
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False, add_help=False)
    for option in (_METHOD, *_LENGTH, *_TRAINING, *_OF_ONE_METHOD):
        option.declare(parser, has_default=True)
    words = [f"--{name}={value}" for name, value in recorded.items()]
    try:
        return parser.parse_known_args(words)[0]
    except argparse.ArgumentError as error:
        raise UsageError(f"the options recorded in the checkpoint are damaged: {error}") from error


def _check_method(method: str, given: Mapping[str, Any]) -> None:
    """Raise UsageError for options of another method."""
    is_lora = method == "lora"
    for name in _OF_PROMPTS if is_lora else _OF_LORA:
        if name in given:
            raise UsageError(
                f"--{name.replace('_', '-')} is for --method "
                + ("ptune or deep_ptune" if is_lora else "lora")
                + f", not {method}; leave it out"
            )
