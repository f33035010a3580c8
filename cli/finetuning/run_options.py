"""The options of `shoal finetune`."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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

_METHODS = ("lora", "ptune", "deep_ptune")
RANK = 8
PRE_SEQ_LEN = 16
LEARNING_RATES = {"lora": 1e-3, "ptune": 1e-2, "deep_ptune": 1e-2}
MAX_LENGTH = 512
"""Tokens of a text, unless the model has fewer positions; memory of peers grows with them."""

MOST_BETWEEN_MILESTONES = 100
_WARMUP_FRACTION = 0.05

# Options that are not given are None until `settle_options` fills them in.
_DEFAULTS = {
    "method": "lora",
    "epochs": 3.0,
    "schedule": "cosine",
    "warmup": _WARMUP_FRACTION,
    "batch_size": 8,
    "accumulate": 1,
    "eval": 0.05,
    "weight_decay": 0.0,
    "clip": 1.0,
    "seed": 0,
    "optimizer": "client",
}
_WITHOUT_DEFAULT = ("updates", "learning_rate", "max_length", "eval_every")
_OF_LORA: dict[str, Any] = {"rank": RANK, "alpha": None, "target_modules": []}
_OF_PROMPTS = {"pre_seq_len": PRE_SEQ_LEN}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shoal finetune`."""
    add_model_argument(parser)
    parser.add_argument(
        "--data", type=Path, required=True, metavar="FILE",
        help="training texts. jsonl: one object per line with text, or with prompt and completion, "
        "which trains on the completion only; csv: the same as columns; txt: paragraphs",
    )  # fmt: skip
    _add_method_argument(parser)
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
    _add_learning_arguments(parser)
    _add_method_arguments(parser)
    add_wait_argument(parser, 120.0)
    parser.add_argument("--json", action="store_true", help="print events as JSON lines")


def settle_options(options: argparse.Namespace, recorded: Mapping[str, str]) -> None:
    """Fill in missing options: from the record of the resumed run, else with their defaults.

    `recorded` comes from `record_options`. Raises UsageError for options of another method, and for
    a damaged record.
    """
    former = _read_recorded(recorded)
    method = options.method or former.method or _DEFAULTS["method"]
    _check_method(method, options)
    if options.epochs is not None or options.updates is not None:
        former.epochs = former.updates = None
    for name in (*_DEFAULTS, *_WITHOUT_DEFAULT, *_list_own(method)):
        if getattr(options, name) is None:
            setattr(options, name, getattr(former, name))
    for name, default in (_DEFAULTS | _OF_LORA | _OF_PROMPTS).items():
        if getattr(options, name) is None:
            setattr(options, name, default)
    options.alpha = options.alpha or 2 * options.rank
    options.learning_rate = options.learning_rate or LEARNING_RATES[method]
    if options.optimizer == "peers" and method != "lora":
        raise UsageError("--optimizer peers works only with --method lora; leave it out")


def record_options(options: argparse.Namespace) -> dict[str, str]:
    """Return the training options of a run as words of a command line.

    >>> options = argparse.Namespace(method="lora", rank=4, target_modules=["q", "v"])
    >>> record_options(options)
    {'method': 'lora', 'rank': '4', 'target-modules': 'q,v'}
    """
    given = vars(options)
    names = [*_DEFAULTS, *_WITHOUT_DEFAULT, *_list_own(options.method)]
    if given.get("updates"):
        names.remove("epochs")
    values = {name: given.get(name) for name in names}
    return {
        name.replace("_", "-"): ",".join(value) if isinstance(value, list) else str(value)
        for name, value in values.items()
        if value is not None and value != []
    }


def _read_recorded(recorded: Mapping[str, str]) -> argparse.Namespace:
    """Return the options of a record; missing ones are None. Raises UsageError for damage."""
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False, add_help=False)
    _add_method_argument(parser)
    _add_learning_arguments(parser)
    _add_method_arguments(parser)
    words = [f"--{name}={value}" for name, value in recorded.items()]
    try:
        return parser.parse_known_args(words)[0]
    except argparse.ArgumentError as error:
        raise UsageError(f"the options recorded in the checkpoint are damaged: {error}") from error


def _list_own(method: str) -> Mapping[str, Any]:
    """Return the options that this method has and others lack, with their defaults."""
    return _OF_LORA if method == "lora" else _OF_PROMPTS


def _check_method(method: str, options: argparse.Namespace) -> None:
    """Raise UsageError for options of another method."""
    is_lora = method == "lora"
    for name in _OF_PROMPTS if is_lora else _OF_LORA:
        if getattr(options, name) is not None:
            raise UsageError(
                f"--{name.replace('_', '-')} is for --method "
                + ("ptune or deep_ptune" if is_lora else "lora")
                + f", not {method}; leave it out"
            )


def _add_method_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--method", choices=_METHODS,
        help="what to train: a LoRA adapter in PEFT format (lora), a soft prompt (ptune), or that "
        f"and one more for each block (deep_ptune) (default: {_DEFAULTS['method']})",
    )  # fmt: skip


def _add_learning_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    length = group.add_mutually_exclusive_group()
    length.add_argument(
        "--epochs", type=parse_positive, metavar="N",
        help="number of passes over the texts (default: 3)",
    )  # fmt: skip
    length.add_argument(
        "--updates", type=parse_count, metavar="N", help="stop after N optimizer updates instead"
    )
    group.add_argument(
        "--learning-rate", type=parse_positive, metavar="R",
        help="peak learning rate (default: "
        + ", ".join(f"{rate:g} for {method}" for method, rate in LEARNING_RATES.items()) + ")",
    )  # fmt: skip
    group.add_argument(
        "--schedule", choices=("cosine", "linear", "constant"),
        help=f"learning rate decay after the warmup (default: {_DEFAULTS['schedule']})",
    )  # fmt: skip
    group.add_argument(
        "--warmup", type=parse_part, metavar="FRACTION",
        help=f"fraction of the updates used for warmup (default: {_DEFAULTS['warmup']})",
    )  # fmt: skip
    group.add_argument(
        "--batch-size", type=parse_count, metavar="N",
        help=f"texts per batch (default: {_DEFAULTS['batch_size']})",
    )  # fmt: skip
    group.add_argument(
        "--accumulate", type=parse_count, metavar="N",
        help=f"gradient accumulation: batches per update (default: {_DEFAULTS['accumulate']})",
    )  # fmt: skip
    group.add_argument(
        "--max-length", type=parse_count, metavar="N",
        help=f"maximum tokens per text (default: {MAX_LENGTH}, or the model's maximum)",
    )  # fmt: skip
    group.add_argument(
        "--eval", type=parse_part, metavar="FRACTION",
        help="fraction of the texts held out for evaluation; 0 disables evaluation "
        f"(default: {_DEFAULTS['eval']})",
    )  # fmt: skip
    group.add_argument(
        "--eval-every", type=parse_count, metavar="N",
        help="updates between evaluations; each also saves a checkpoint (default: a tenth of all "
        f"updates, at most {MOST_BETWEEN_MILESTONES})",
    )  # fmt: skip
    group.add_argument(
        "--weight-decay", type=parse_non_negative, metavar="D",
        help=f"AdamW weight decay (default: {_DEFAULTS['weight_decay']})",
    )  # fmt: skip
    group.add_argument(
        "--clip", type=parse_positive, metavar="NORM",
        help=f"clip the global gradient norm to NORM (default: {_DEFAULTS['clip']})",
    )  # fmt: skip
    group.add_argument(
        "--seed", type=parse_whole, metavar="S",
        help="random seed for the order of texts, the evaluation split and the initial weights "
        f"(default: {_DEFAULTS['seed']})",
    )  # fmt: skip


def _add_method_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("options of one method")
    group.add_argument("--rank", type=parse_count, metavar="R", help=f"LoRA rank (default: {RANK})")
    group.add_argument(
        "--alpha", type=parse_positive, metavar="A",
        help="LoRA alpha; the adapter is scaled by alpha / rank (default: twice the rank)",
    )  # fmt: skip
    group.add_argument(
        "--target-modules", type=lambda text: text.split(","), metavar="NAMES",
        help="linear layers with LoRA weights, such as q_proj,v_proj (default: all of the blocks)",
    )  # fmt: skip
    group.add_argument(
        "--optimizer", choices=("client", "peers"),
        help="where the LoRA optimizer runs; with peers, neither gradients nor adapter weights "
        f"are transferred at each update (default: {_DEFAULTS['optimizer']})",
    )  # fmt: skip
    group.add_argument(
        "--pre-seq-len", type=parse_count, metavar="N",
        help=f"length of the soft prompt in tokens (default: {PRE_SEQ_LEN})",
    )  # fmt: skip
