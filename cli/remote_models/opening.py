"""Opens models over a swarm, and their tokenizers, with the client's libraries kept quiet.

Imports nothing heavy itself: torch and transformers are loaded by the functions.
"""

import argparse
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ...protocol.errors import ModelError
from ..options.adapter_folder import find_adapter
from ..options.bundled_model import find_commit, find_model
from ..options.join_options import read_joining
from ..terminal.heavy_imports import importing_much
from ..terminal.interrupts import quitting_at_once
from ..terminal.terminal import Terminal
from ..terminal.text_printer import show_waiting

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ...client.model.causal_lm import DistributedCausalLM


@dataclass(frozen=True)
class OpenedModel:
    """A model over a swarm that generates text, as options say."""

    model: "DistributedCausalLM"
    tokenizer: "PreTrainedTokenizerBase"
    has_published_adapter: bool
    wait_seconds: float
    """How long blocks are waited for that nobody serves."""


def import_client() -> None:
    """Import the client, seconds of torch and transformers, and keep the libraries quiet."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with importing_much(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import_transformers()
        from huggingface_hub.utils import disable_progress_bars
        from transformers.utils import logging

        # For those who ask for them later.
        from ...client.model import causal_lm  # noqa: F401
        from ...client.runtime import client  # noqa: F401

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    disable_progress_bars()


def import_transformers() -> None:
    """Import parts of transformers without two things that no text needs.

    Each takes a fifth of what torch does. To make the same table of models twice, it reads 3,000
    files twice. And losses of models for images load scipy's optimizers.
    """
    import transformers
    from transformers.utils import import_utils

    folder = Path(transformers.__file__).parent / "models"
    with suppress(AttributeError, ImportError, TypeError):  # of a release that is made differently
        make_table = import_utils.define_import_structure
        table = {
            needs: {
                name.removeprefix("models."): names
                for name, names in parts.items()
                if name.startswith("models.")
            }
            for needs, parts in make_table(folder, prefix="models").items()
        }

        def get_table(path: str, *others: object, **options: object) -> object:
            is_same = Path(path) == folder / "__init__.py" and not others and not options
            return table if is_same else make_table(path, *others, **options)

        with _replacing(import_utils, "define_import_structure", get_table):
            import_module("transformers.models")
        with _replacing(transformers.utils, "is_scipy_available", lambda: False):
            import_module("transformers.loss.loss_utils")


@contextmanager
def _replacing(module: ModuleType, name: str, value: object) -> Iterator[None]:
    replaced = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, replaced)


def load_tokenizer(name: str) -> "tuple[PreTrainedTokenizerBase, str]":
    """Return the tokenizer of a model and the revision that both are to be opened at.

    A branch of the Hub may move between two questions. Code that comes with a model is never run.
    Raises ModelError when the model, or its tokenizer, cannot be used.
    """
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    revision = find_commit(name)
    import_client()
    from transformers import AutoTokenizer

    from ...client.model.local_layers import open_checkpoint

    folder = Path(name).expanduser()
    # First, because transformers reads config.json for its tokenizer: its errors would name only
    # the tokenizer, or make no sense where the file is damaged.
    checkpoint, _ = open_checkpoint(name, revision=revision)
    if folder.is_dir() and not any(folder.glob("*token*")):
        raise ModelError(f"{name} has no tokenizer; add its files, such as tokenizer.json")
    try:
        return AutoTokenizer.from_pretrained(
            name, revision=checkpoint.revision, trust_remote_code=False
        ), checkpoint.revision
    except Exception as error:  # tokenizers, in Rust, raises no narrower one
        reason = " ".join(str(error).split())
        raise ModelError(f"the tokenizer of {name} cannot be loaded: {reason:.200}") from error


def open_model(name: str, initial_peers: Sequence[str], **settings: Any) -> "DistributedCausalLM":
    """Load the client's layers of a model, and join the swarm; raises what from_pretrained does.

    `settings` are other arguments of `from_pretrained`, such as those of `ClientConfig`; a setting
    of None keeps its default.
    """
    import_client()
    from ...client.model.causal_lm import DistributedCausalLM
    from ...client.runtime.client import make_join

    chosen = {name: value for name, value in settings.items() if value is not None}
    return DistributedCausalLM.from_pretrained(
        name, join_swarm=make_join(), initial_peers=list(initial_peers), **chosen
    )


def open_for_text(options: argparse.Namespace, notices: Terminal) -> OpenedModel:
    """Join the swarm that the options name; see `add_generation_arguments`."""
    joining = read_joining(options)
    name, adapter = find_model(options.model), find_adapter(options.adapter)
    with show_waiting(notices, lambda: "Joining the swarm"):
        # transformers imports its parts when they are first used, and turns an interrupt there
        # into errors of its own.
        with quitting_at_once(options.json):
            tokenizer, revision = load_tokenizer(name)
        model = open_model(
            name,
            joining.initial_peers,
            revision=revision,
            torch_dtype=options.dtype,
            failover_timeout_seconds=options.wait,
            kv_format=options.kv,
            join=joining.join,
            delivery=options.delivery,
            standby=options.standby,
            **adapter,
        )
    is_published = isinstance(adapter.get("active_adapter"), str)
    return OpenedModel(model, tokenizer, is_published, options.wait)
