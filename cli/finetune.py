"""`shoal finetune`: teach a model texts of one's own, through a swarm that serves it."""

import argparse
import contextlib
import fcntl
import itertools
import math
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..protocol.errors import RouteError, ShoalError, UsageError
from .finetune_options import (
    MAX_LENGTH,
    MOST_BETWEEN_MILESTONES,
    add_arguments,
    record_options,
    settle_options,
)
from .finetune_plot import draw_losses, save_losses
from .finetune_screen import Reporter, RunFacts, RunResult, make_reporter, quote_use
from .terminal.bundled_model import find_model
from .terminal.interrupts import INTERRUPTED, end_in_good_order, hold_interrupts, quitting_at_once
from .terminal.joining import Joining, read_joining
from .terminal.quantities import count_of
from .terminal.terminal import Progress, Terminal
from .terminal.text_generation import import_client, load_tokenizer

if TYPE_CHECKING:
    from ..client.learning.dataset import Dataset
    from ..client.learning.finetune_run import FinetuneRun, RunConfig
    from ..client.learning.text_files import TrainingText
    from ..client.model.causal_lm import DistributedCausalLM

_MAX_PROMPT_LETTERS = 40

_FEW_UPDATES = 30
"""With fewer an adapter that begins with zeros has hardly left them."""

__all__ = ["add_arguments", "run"]


def run(options: argparse.Namespace) -> int:
    """Fine-tune; return 0, or 130 after Ctrl-C, which leaves a checkpoint."""
    joining = read_joining(
        options,
        f"; or start a swarm on this machine: `shoal swarm {options.model} --peers 2` in another "
        "terminal prints its address",
    )
    name = find_model(options.model)
    _check_folder(options.out, options.resume)
    if not options.resume:
        settle_options(options, {})
    reporter = make_reporter(options.json)
    notices = Terminal(sys.stderr)
    with end_in_good_order():
        with Progress(notices, lambda: f"Reading {options.data.name}"):
            if options.resume:
                settle_options(options, _read_options(options.out))
            texts = _read_texts(name, options)
        with _holding(options.out):
            with Progress(notices, lambda: "Joining the swarm"):
                model = _open_model(name, joining, options)
            with model:
                return _fine_tune(model, texts, joining, options, reporter)


@dataclass(frozen=True)
class _Texts:
    """What is to be learned."""

    dataset: "Dataset"
    max_length: int
    prompt: str
    """For the line that uses what was learned."""


def _check_folder(folder: Path, is_resumed: bool) -> None:
    """Refuse, before anything else takes time, a folder that holds something else."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; --out takes a folder")
    files = list(folder.iterdir()) if folder.is_dir() else []
    has_checkpoint = any(file.name.startswith("checkpoint-") for file in files)
    if is_resumed and not has_checkpoint:
        raise UsageError(
            f"there is no checkpoint in {folder}; leave out --resume to start a new run"
        )
    if not is_resumed and (has_checkpoint or any(file.suffix == ".safetensors" for file in files)):
        raise UsageError(
            f"{folder} already holds a run; continue it with --resume, or choose another --out"
        )


@contextlib.contextmanager
def _holding(folder: Path) -> Iterator[None]:
    """Keep other runs out of a folder; two would delete each other's checkpoints.

    Raises UsageError where another one is at work, and UnavailableError where nothing can be
    written, before a swarm works for nothing.
    """
    from ..client.learning.checkpoints import naming_failures

    with naming_failures(folder):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems know no locks
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UsageError(
                    f"another run is using {folder}; wait for it, or choose another --out"
                ) from error
        yield
    finally:
        os.close(descriptor)


def _read_options(folder: Path) -> Mapping[str, str]:
    """Return the options of the run that goes on."""
    with quitting_at_once():
        import_client()
    from ..client.learning.checkpoints import Checkpoints

    return Checkpoints(folder).load_newest().options


def _read_texts(name: str, options: argparse.Namespace) -> _Texts:
    """Read the data and turn it into tokens; the swarm is not needed for that."""
    with quitting_at_once():
        tokenizer = load_tokenizer(name)
    from ..client.learning.dataset import make_dataset
    from ..client.learning.text_files import read_texts

    num_positions = _count_positions(name)
    if options.method != "lora":
        num_positions -= options.pre_seq_len
    max_length = options.max_length or min(MAX_LENGTH, num_positions)
    if not 2 <= max_length <= num_positions:
        raise UsageError(
            f"texts of {max_length} tokens are not possible: this model takes 2 to {num_positions}"
            + (" next to a soft prompt of this length" if options.method != "lora" else "")
        )
    texts = read_texts(options.data)
    first = next(texts)
    texts = itertools.chain([first], texts)
    made = make_dataset(texts, tokenizer, max_length, options.eval, options.seed)
    return _Texts(made, max_length, _choose_prompt(first))


def _choose_prompt(text: "TrainingText") -> str:
    """Return a prompt to try what was learned with: that of a text, or how it begins.

    Quotes and the like would be read by the shell.
    """
    words = (text.prompt or text.completion).split()
    prompt = " ".join(words if text.prompt else words[:4])
    is_plain = len(prompt) <= _MAX_PROMPT_LETTERS and not set(prompt) & set('"$`\\!')
    return prompt if is_plain else "…"


def _count_positions(name: str) -> int:
    from ..client.model.local_layers import load_config
    from ..models.checkpoints.checkpoint import Checkpoint

    config = load_config(Checkpoint.open(name))
    return getattr(config, "max_position_embeddings", None) or sys.maxsize


def _open_model(name: str, joining: Joining, options: argparse.Namespace) -> "DistributedCausalLM":
    import torch

    torch.manual_seed(options.seed)  # new prompts are random
    prompts = {"tuning_mode": options.method, "pre_seq_len": options.pre_seq_len}
    import_client()
    from ..client import AutoDistributedModelForCausalLM

    return AutoDistributedModelForCausalLM.from_pretrained(
        name,
        initial_peers=list(joining.initial_peers),
        join=joining.join,
        failover_timeout_seconds=options.wait,
        **(prompts if options.method != "lora" else {}),
    )


def _plan_run(texts: _Texts, options: argparse.Namespace) -> "RunConfig":
    """Return how the run learns."""
    from ..client.learning.finetune_run import RunConfig

    num_texts = len(texts.dataset.training)
    batch_rows = min(options.batch_size, num_texts)  # the same text twice would be work for nothing
    texts_per_update = batch_rows * options.accumulate
    num_updates = options.updates or math.ceil(options.epochs * num_texts / texts_per_update)
    return RunConfig(
        num_updates,
        options.learning_rate,
        batch_rows,
        options.accumulate,
        options.schedule,
        math.ceil(options.warmup * num_updates),
        options.weight_decay,
        options.clip,
        options.eval_every or min(MOST_BETWEEN_MILESTONES, math.ceil(num_updates / 10)),
        options.seed,
    )


def _fine_tune(
    model: "DistributedCausalLM",
    texts: _Texts,
    joining: Joining,
    options: argparse.Namespace,
    reporter: Reporter,
) -> int:
    from ..client.learning.finetune_run import FinetuneRun, SpoiltRunError
    from ..client.learning.learners import AdapterPlan, make_learner

    plan = AdapterPlan(
        options.rank,
        options.alpha,
        options.target_modules,
        options.seed,
        options.optimizer == "peers",
    )
    learner = make_learner(model, plan)
    config = _plan_run(texts, options)
    tuning = FinetuneRun(
        learner, texts.dataset, config, options.out, hold_interrupts, record_options(options)
    )
    changes = tuning.resume() if options.resume else []
    facts = RunFacts(
        options.model,
        options.method,
        sum(parameter.numel() for parameter in learner.named_parameters().values()),
        len(texts.dataset.training),
        len(texts.dataset.evaluation),
        config.num_updates,
        config.batch_rows * config.num_accumulated,
        options.out,
        [
            *texts.dataset.describe_limits(texts.max_length),
            *_describe_few_updates(options, config),
            *changes,
        ],
    )
    reporter.begin(facts, tuning.progress.num_updates)
    try:
        _learn(tuning, model, reporter)
    except SpoiltRunError:
        raise
    except (KeyboardInterrupt, ShoalError) as error:
        reporter.stop(tuning.save_last_checkpoint())
        if isinstance(error, RouteError) and error.missing:
            raise _advise(error, options.model) from error
        if isinstance(error, ShoalError):
            raise
        return INTERRUPTED
    tuning.save_result()
    reporter.finish(_finish(tuning, texts.prompt, options, joining))
    return 0


def _advise(error: RouteError, model: str) -> RouteError:
    """Return the same error with what to do about the blocks that it names."""
    name = shlex.quote(model)
    starts = " and ".join(f"`shoal serve {name} --blocks {span} …`" for span in error.missing)
    advice = f"start peers for them with {starts}, or increase --wait"
    return RouteError(f"{error}; {advice}", error.missing)


def _describe_few_updates(options: argparse.Namespace, config: "RunConfig") -> list[str]:
    """Return a sentence where texts and epochs make few updates, unless so many were asked for."""
    number = config.num_updates
    if options.updates or number >= _FEW_UPDATES:
        return []
    is_single = config.batch_rows * config.num_accumulated == 1
    advice = "more --epochs" if is_single else "more --epochs or a smaller --batch-size"
    return [f"{count_of(number, 'update')} may be too few; use {advice}"]


def _learn(tuning: "FinetuneRun", model: "DistributedCausalLM", reporter: Reporter) -> None:
    from ..client.learning.finetune_run import Milestone

    with reporter.watching(lambda: model.missing_blocks):
        for event in tuning.learn():
            blocks = model.transformer.h
            reporter.note_failovers(tuning.progress.num_updates, blocks.take_failovers())
            if isinstance(event, Milestone):
                reporter.note_milestone(event)
            else:
                reporter.note_update(event, blocks.take_recent_hops())


def _finish(
    tuning: "FinetuneRun", prompt: str, options: argparse.Namespace, joining: Joining
) -> RunResult:
    """Write what is left to write; what was learned is safe by now."""
    progress, plot, table = tuning.progress, options.out / "losses.png", options.out / "losses.csv"
    save_losses(progress.losses, progress.eval_losses, table)
    title = f"{Path(options.model).name} fine-tuned on {options.data.name} ({options.method})"
    draw_losses(progress.losses, progress.eval_losses, title, plot)
    use = quote_use(options.model, prompt, options.out, joining.initial_peers, options.join)
    return RunResult(progress, options.out, plot, table, use)
