"""The loop of a fine-tuning run: batches in, updates out, checkpoints that it goes on from.

`Learner` hides the trained parameters and the source of their gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ...protocol.errors import ErrorCode, RefusedError, RouteError, ShoalError, UsageError
from .checkpoints import (
    Checkpoints,
    RunProgress,
    load_optimizer,
    name_checkpoint,
    naming_failures,
    save_optimizer,
)
from .dataset import Batch, Dataset, ShuffledTexts, cut_into_batches, make_batch

MOST_SKIPPED_IN_A_ROW = 3
"""Updates without a finite loss before a run is given up: more data will not mend it."""


_LENGTH, _WARMUP = "number of updates", "number of updates to warm up"


class SpoiltRunError(ShoalError):
    """The updates since the last checkpoint are worthless and must not be saved."""


class Learner(Protocol):
    """The trainable part of a run beside frozen blocks: an adapter, or prompts.

    Its optimizer runs here unless a subclass says otherwise.
    """

    @property
    def facts(self) -> Mapping[str, Any]:
        """The learner's settings in JSON types; `--resume` needs the same."""
        ...

    def named_parameters(self) -> Mapping[str, nn.Parameter]:
        """Return the parameters that the optimizer updates."""
        ...

    def make_optimizer(self, learning_rate: float, weight_decay: float) -> torch.optim.Optimizer:
        """Return its AdamW optimizer."""
        parameters = self.named_parameters().values()
        return torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=weight_decay)

    def clip_gradients(self, optimizer: torch.optim.Optimizer, max_norm: float) -> float:
        """Clip the gradients of the next update; return their norm before."""
        return float(nn.utils.clip_grad_norm_(self.named_parameters().values(), max_norm))

    def compute_loss(self, batch: Batch) -> Tensor:
        """Return the mean loss over the learned tokens of a batch, for backward()."""
        ...

    def save(self, folder: Path) -> None:
        """Write it into a folder, for `load` and for use in other programs."""
        ...

    def load(self, folder: Path) -> None:
        """Load a folder that `save` wrote; raises UsageError when it does not fit."""
        ...


@dataclass(frozen=True)
class RunConfig:
    """The training settings of a run."""

    num_updates: int
    learning_rate: float
    batch_rows: int = 8
    """Texts that pass through the swarm together."""
    num_accumulated: int = 1
    """Batches whose gradients are added up for one update."""
    schedule: str = "cosine"
    num_warmup_updates: int = 0
    weight_decay: float = 0.0
    max_gradient_norm: float = 1.0
    eval_period: int = 50
    """Updates from one milestone to the next."""
    seed: int = 0

    def list_settings(self) -> dict[str, Any]:
        """Return the settings that may change when a run is resumed, under their names for people.

        A rate that was too high has to be lowered, and a run may be made longer.
        """
        return {
            "learning rate": self.learning_rate,
            "schedule": self.schedule,
            _LENGTH: self.num_updates,
            _WARMUP: self.num_warmup_updates,
            "weight decay": self.weight_decay,
            "limit of gradients": self.max_gradient_norm,
        }


@dataclass(frozen=True)
class Updated:
    """One optimizer update, with the mean loss over its texts."""

    number: int
    loss: float
    rate: float
    gradient_norm: float
    num_tokens: int

    @property
    def is_skipped(self) -> bool:
        """Whether the update was skipped, because the loss or the gradients were not finite."""
        return not (math.isfinite(self.loss) and math.isfinite(self.gradient_norm))


@dataclass(frozen=True)
class Milestone:
    """A checkpoint after so many updates, with the evaluation loss, if texts are held out."""

    number: int
    eval_loss: float | None


class FinetuneRun:
    """A fine-tuning run. It may stop between any two updates, and resumes from a checkpoint.

    `uninterrupted` holds back whatever would break off an update in the middle of being applied;
    `options` are kept in its checkpoints, see `RunProgress`.
    """

    def __init__(
        self,
        learner: Learner,
        dataset: Dataset,
        config: RunConfig,
        folder: Path,
        uninterrupted: Callable[[], AbstractContextManager[Any]] = nullcontext,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._learner = learner
        self._dataset = dataset
        self._config = config
        self._uninterrupted = uninterrupted
        self._texts = ShuffledTexts(len(dataset.training), config.seed)
        self._parameters = dict(learner.named_parameters())
        self._optimizer = learner.make_optimizer(config.learning_rate, config.weight_decay)
        self.checkpoints = Checkpoints(folder)
        self.progress = RunProgress(
            0, facts=self._make_facts(), settings=config.list_settings(), options=dict(options)
        )
        self._num_skipped_in_a_row = 0

    def _make_facts(self) -> dict[str, Any]:
        return {
            **self._learner.facts,
            "texts": self._dataset.digest,
            "texts per update": self._config.batch_rows * self._config.num_accumulated,
            "seed": self._config.seed,
        }

    def resume(self) -> Sequence[str]:
        """Resume from the newest checkpoint; return a sentence about each changed setting.

        Raises UsageError if there is no checkpoint, or it is of something else than this run.
        """
        progress = self.checkpoints.load_newest()
        newest = self.checkpoints.find()[-1]
        others = _list_differences(progress.facts, self.progress.facts)
        if others:
            differences = ", and in ".join(others)
            raise UsageError(
                f"the run in {self.checkpoints.folder} differs in {differences}; --resume needs "
                "the same"
            )
        self._learner.load(newest)
        has_updates = any(loss is not None for loss in progress.losses)
        load_optimizer(self._optimizer, self._parameters, newest, has_updates)
        former, ours = progress.settings, self.progress.settings
        changes = [name for name, value in ours.items() if former.get(name) != value]
        if _LENGTH in changes and _WARMUP in changes:
            changes.remove(_WARMUP)  # nobody asked for it: it is a fraction of the length
        self.progress = replace(
            progress, settings=self.progress.settings, options=self.progress.options
        )
        return [f"The {name} was {former.get(name)}; it is now {ours[name]}." for name in changes]

    def learn(self) -> Iterator[Updated | Milestone]:
        """Train until the last update; yield each event as it happens.

        Raises SpoiltRunError when it leads nowhere or peers cannot compute with what was learned,
        and the errors of passes through a swarm.
        """
        try:
            yield from self._learn()
        except RefusedError as error:
            if error.code is not ErrorCode.BAD_VALUES:
                raise
            number = self.progress.num_updates
            what = f"peers refuse to continue after update {number:,}: {error}"
            raise SpoiltRunError(self._describe_spoilt(what, number)) from error

    def _describe_spoilt(self, what: str, number: int) -> str:
        """Return what happened and what to do: `number` updates lead to something of no use.

        So is a checkpoint of it.
        """
        found = self.checkpoints.find()
        is_kept = number > 0 and bool(found) and name_checkpoint(number) == found[-1].name
        return (
            f"{what}. The learning rate was too high: "
            + (f"delete {found[-1]}, and " if is_kept else "")
            + "continue from the last checkpoint with --resume and a --learning-rate much below "
            f"{self._config.learning_rate:g}"
        )

    def _learn(self) -> Iterator[Updated | Milestone]:
        while True:
            number, last = self.progress.num_updates, self._config.num_updates
            # Not while updates are skipped: what was learned may be spoilt, and would take the
            # place of a checkpoint that is not.
            is_sound = not self._num_skipped_in_a_row
            is_due = number >= last or (is_sound and number % self._config.eval_period == 0)
            if is_due and number not in self.progress.eval_losses:
                milestone = Milestone(number, self._evaluate())
                self.save_checkpoint()
                yield milestone
            if number >= last:
                return
            yield self._update()

    def save_checkpoint(self) -> Path:
        """Write a checkpoint and return its folder. Not while an update is applied."""
        return self.checkpoints.save(self.progress, self._write)

    def save_last_checkpoint(self) -> int:
        """Write where the run is, unless its peers are out of reach or in the middle of an update.

        Returns after how many updates --resume goes on.
        """
        try:
            self.save_checkpoint()
        except (RouteError, RefusedError, UsageError):
            found = self.checkpoints.find()
            return self.checkpoints.load_progress(found[-1]).num_updates if found else 0
        return self.progress.num_updates

    def save_result(self) -> None:
        """Write the trained weights into the folder of the run."""
        with naming_failures(self.checkpoints.folder):
            self._learner.save(self.checkpoints.folder)

    def _update(self) -> Updated:
        config, number = self._config, self.progress.num_updates
        batches = self._take_batches(number)
        rate = config.learning_rate * compute_rate_fraction(
            number, config.num_updates, config.num_warmup_updates, config.schedule
        )
        self._optimizer.zero_grad()
        loss = self._add_gradients(batches)
        gradient_norm = math.nan
        if math.isfinite(loss):
            gradient_norm = self._learner.clip_gradients(self._optimizer, config.max_gradient_norm)
        num_tokens = sum(batch.num_tokens for batch in batches)
        updated = Updated(number + 1, loss, rate, gradient_norm, num_tokens)
        with self._uninterrupted():
            self._apply(updated)
        if self._num_skipped_in_a_row >= MOST_SKIPPED_IN_A_ROW:
            what = (
                f"{MOST_SKIPPED_IN_A_ROW} updates in a row had a loss or gradients that are not "
                "finite"
            )
            learned = updated.number - self._num_skipped_in_a_row
            raise SpoiltRunError(self._describe_spoilt(what, learned))
        return updated

    def _take_batches(self, update: int) -> Sequence[Batch]:
        rows, count = self._config.batch_rows, self._config.num_accumulated
        taken = self._texts.take(update * rows * count, rows * count)
        examples = [self._dataset.training[index] for index in taken]
        return [
            make_batch(examples[start : start + rows], self._dataset.padding_id)
            for start in range(0, rows * count, rows)
        ]

    def _add_gradients(self, batches: Sequence[Batch]) -> float:
        """Accumulate the gradients of all batches; return the mean loss over their tokens.

        A loss that is no number is not taken back through the swarm.
        """
        num_learned = sum(batch.num_learned for batch in batches)
        sum_loss = 0.0
        for batch in batches:
            loss = self._learner.compute_loss(batch) * (batch.num_learned / num_learned)
            sum_loss += float(loss.detach())
            if not math.isfinite(sum_loss):
                break
            loss.backward()
        return sum_loss

    def _apply(self, updated: Updated) -> None:
        progress = self.progress
        if updated.is_skipped:
            self._num_skipped_in_a_row += 1
        else:
            for group in self._optimizer.param_groups:
                group["lr"] = updated.rate
            self._optimizer.step()
            self._num_skipped_in_a_row = 0
        progress.losses.append(None if updated.is_skipped else updated.loss)
        progress.num_updates = updated.number

    @torch.no_grad()
    def _evaluate(self) -> float | None:
        """Return the mean loss over all texts for evaluation, if there are any."""
        sum_loss, num_learned = 0.0, 0
        texts, rows = self._dataset.evaluation, self._config.batch_rows
        for batch in cut_into_batches(texts, rows, self._dataset.padding_id):
            sum_loss += float(self._learner.compute_loss(batch)) * batch.num_learned
            num_learned += batch.num_learned
        if not num_learned:
            return None
        self.progress.eval_losses[self.progress.num_updates] = sum_loss / num_learned
        return sum_loss / num_learned

    def _write(self, folder: Path) -> None:
        self._learner.save(folder)
        save_optimizer(self._optimizer, self._parameters, folder)


def compute_rate_fraction(
    update: int, num_updates: int, num_warmup_updates: int, schedule: str
) -> float:
    """Return the learning rate of an update, counted from 0, as a fraction of its highest value.

    It rises in a straight line, then stays, or falls to nothing after the last update.

    >>> [compute_rate_fraction(update, 6, 2, "linear") for update in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    >>> round(compute_rate_fraction(4, 6, 2, "cosine"), 9)
    0.5
    >>> compute_rate_fraction(5, 6, 0, "constant")
    1.0
    """
    if update < num_warmup_updates:
        return (update + 1) / num_warmup_updates
    if schedule == "constant":
        return 1.0
    done = (update - num_warmup_updates) / max(1, num_updates - num_warmup_updates)
    return 1.0 - done if schedule == "linear" else (1 + math.cos(math.pi * done)) / 2


def _list_differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """Return the names of what differs, with both values where they are short."""
    differences: list[str] = []
    for name, value in ours.items():
        known = theirs.get(name)
        if known != value:
            is_short = len(f"{known}{value}") < 60
            differences.append(f"{name}: {known} there, {value} here" if is_short else name)
    return differences
