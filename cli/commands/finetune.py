"""`shoal finetune`: fine-tune a model with texts of the user, through a swarm that serves it."""

import argparse
import contextlib
import fcntl
import math
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...protocol.errors import RouteError, ShoalError, UsageError
from ..finetuning.run_options import (
    LEARNING_RATES,
    MOST_BETWEEN_MILESTONES,
    add_arguments,
    record_options,
    settle_options,
)
from ..finetuning.run_report import RunFacts, RunReporter, make_result
from ..finetuning.run_texts import RunTexts, check_texts, describe_limits, read_texts
from ..options.bundled_model import find_model
from ..options.join_options import Joining, quote_command, read_joining
from ..options.quantities import count_of
from ..remote_models.opening import import_client, load_tokenizer, open_model
from ..terminal.interrupts import INTERRUPTED, hold_interrupts, quitting_at_once, stop_on_sigterm
from ..terminal.reporter import Reporter
from ..terminal.terminal import Progress, Terminal

if TYPE_CHECKING:
    from ...client.finetuning.finetune_run import FinetuneRun, RunConfig
    from ...client.model.causal_lm import DistributedCausalLM

_FEW_UPDATES = 30
"""After fewer updates an adapter, initialised with zeros, has hardly changed."""

__all__ = ["add_arguments", "run"]


def run(options: argparse.Namespace) -> int:
    """Fine-tune; return 0, or 130 after Ctrl-C, which leaves a checkpoint."""
    joining = read_joining(
        options,
        f"; or start a swarm on this machine: `shoal swarm {shlex.quote(options.model)} --peers 2` "
        "in another terminal prints its address",
    )
    name = find_model(options.model)
    _check_folder(options.out, options.resume)
    if not options.resume:
        settle_options(options, {})
    check_texts(options.data)  # behind the imports it would take ten seconds
    notices = Terminal(sys.stderr)
    reporter = RunReporter(Reporter(Terminal(sys.stdout), notices, options.json))
    with stop_on_sigterm():
        with Progress(notices, lambda: f"Reading {options.data.name}"):
            if options.resume:
                settle_options(options, _read_options(options.out))
            with quitting_at_once(options.json):
                tokenizer, revision = load_tokenizer(name)
            texts = read_texts(name, tokenizer, options)
        with _locking(options.out):
            with Progress(notices, lambda: "Joining the swarm"):
                model = _open_model(name, revision, joining, options)
            with model:
                return _fine_tune(model, texts, joining, options, reporter)


def _check_folder(folder: Path, is_resumed: bool) -> None:
    """Raise UsageError for a folder that holds something else, before anything takes time."""
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
def _locking(folder: Path) -> Iterator[None]:
    """Lock a folder against other runs, which would delete the checkpoints of this one.

    Raises UsageError if another run holds it or it cannot be written, before the swarm computes
    anything. New folders into which nothing was written are removed.
    """
    new = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise UsageError(f"cannot write to {folder}: {error.strerror}") from error
    try:
        with contextlib.suppress(OSError):  # some network file systems have no locks
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UsageError(
                    f"another run is using {folder}; wait for it, or choose another --out"
                ) from error
        yield
    finally:
        os.close(descriptor)
        with contextlib.suppress(OSError):  # a run has left something in it
            for each in new:
                each.rmdir()


def _read_options(folder: Path) -> Mapping[str, Any]:
    """Return the recorded options of the run to resume."""
    with quitting_at_once():
        import_client()
    from ...client.finetuning.checkpoints import Checkpoints

    return Checkpoints(folder).load_newest().options


def _open_model(
    name: str, revision: str, joining: Joining, options: argparse.Namespace
) -> "DistributedCausalLM":
    import torch

    torch.manual_seed(options.seed)  # new prompts are random
    prompts = {"tuning_mode": options.method, "pre_seq_len": options.pre_seq_len}
    return open_model(
        name,
        joining.initial_peers,
        revision=revision,
        join=joining.join,
        failover_timeout_seconds=options.wait,
        **(prompts if options.method != "lora" else {}),
    )


def _plan_run(texts: RunTexts, options: argparse.Namespace) -> "RunConfig":
    from ...client.finetuning.finetune_run import RunConfig

    num_texts = len(texts.dataset.training)
    batch_rows = min(options.batch_size, num_texts)  # no text twice in a batch
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
    texts: RunTexts,
    joining: Joining,
    options: argparse.Namespace,
    reporter: RunReporter,
) -> int:
    from ...client.finetuning.finetune_run import FinetuneRun, SpoiltRunError
    from ...client.finetuning.learners import make_learner

    learner = make_learner(
        model,
        rank=options.rank,
        alpha=options.alpha,
        target_modules=options.target_modules,
        seed=options.seed,
        is_trained_at_peers=options.optimizer == "peers",
    )
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
        [
            *describe_limits(texts.dataset, texts.max_length),
            *_describe_few_updates(options, config),
            *changes,
            *_describe_end(tuning, config, options),
        ],
    )
    reporter.begin(facts, tuning.progress.num_updates)
    try:
        _learn(tuning, model, reporter)
    except SpoiltRunError as error:
        default = LEARNING_RATES[options.method]
        raise SpoiltRunError(f"{error}; the default is {default:g}") from error
    except (KeyboardInterrupt, ShoalError) as error:
        reporter.stop(tuning.save_last_checkpoint())
        if isinstance(error, RouteError) and error.missing:
            raise _advise(error, options, joining) from error
        if isinstance(error, ShoalError):
            raise
        return INTERRUPTED
    tuning.save_result()
    reporter.finish(make_result(tuning, texts.prompt, options, joining))
    return 0


def _advise(error: RouteError, options: argparse.Namespace, joining: Joining) -> RouteError:
    """Return the same error with advice for the blocks that it names."""
    serve, swarm = f"shoal serve {shlex.quote(options.model)}", joining.initial_peers
    commands = [
        quote_command(f"{serve} --blocks {span}", swarm, options.join) for span in error.missing
    ]
    starts = " and ".join(f"`{command}`" for command in commands)
    advice = f"start peers for them with {starts}, or increase --wait"
    return RouteError(f"{error}; {advice}", error.missing)


def _describe_few_updates(options: argparse.Namespace, config: "RunConfig") -> list[str]:
    """Return advice if texts and epochs make few updates; none if --updates chose the number."""
    number = config.num_updates
    if options.updates or number >= _FEW_UPDATES:
        return []
    is_single = config.batch_rows * config.num_accumulated == 1
    advice = "more --epochs" if is_single else "more --epochs or a smaller --batch-size"
    return [f"{count_of(number, 'update')} may be too few; use {advice}"]


def _describe_end(
    tuning: "FinetuneRun", config: "RunConfig", options: argparse.Namespace
) -> list[str]:
    """Return advice if the run to resume has made all of its updates."""
    if tuning.progress.num_updates < config.num_updates:
        return []
    return [
        f"This run is complete; use --{'updates' if options.updates else 'epochs'} to train longer."
    ]


def _learn(tuning: "FinetuneRun", model: "DistributedCausalLM", reporter: RunReporter) -> None:
    from ...client.finetuning.finetune_run import Milestone

    with reporter.watching(lambda: model.missing_blocks):
        for event in tuning.learn():
            blocks = model.transformer.h
            reporter.note_failovers(tuning.progress.num_updates, blocks.take_failovers())
            if isinstance(event, Milestone):
                reporter.note_milestone(event)
            else:
                reporter.note_update(event, blocks.take_recent_hops())
