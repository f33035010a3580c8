"""Reports a fine-tuning run: as a table and a line that moves, or as lines of JSON."""

import argparse
import math
import shlex
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...protocol.spans import Span
from ..options.join_options import Joining, quote_command
from ..options.quantities import count_of
from ..remote_models.routes import describe_pass_failover, pass_failover_facts, route_facts, tail_of
from ..terminal.reporter import Reporter
from ..terminal.terminal import Terminal
from .loss_plot import draw_losses, save_losses

if TYPE_CHECKING:
    from ...client.finetuning.checkpoints import RunProgress
    from ...client.finetuning.finetune_run import FinetuneRun, Milestone, Updated
    from ...client.routing.route import Failover, Hop

_NUM_RECENT = 20
"""Updates that the speed is the mean of."""

_NUM_RECENT_LOSSES = 5

_MAX_LINE = 74
"""Columns left on a terminal with 80, behind the spinner."""


@dataclass(frozen=True)
class RunFacts:
    """The plan of a run."""

    model: str
    method: str
    num_trained: int
    """Trainable parameters."""
    num_texts: int
    num_eval_texts: int
    num_updates: int
    texts_per_update: int
    notices: Sequence[str] = ()


@dataclass(frozen=True)
class RunResult:
    """The results of a finished run."""

    progress: "RunProgress"
    adapter: Path
    plot: Path
    table: Path
    use: str
    """A command that uses the trained weights."""
    publish: str = ""
    """A command that publishes them; empty for prompts."""


class SpeedMeter:
    """The speed of a run, by its recent updates. May be read on another thread than it is fed."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._since = self.started_at = now()
        self._recent: deque[tuple[int, float, float]] = deque(maxlen=_NUM_RECENT)

    def note(self, updated: "Updated") -> None:
        """Count an update that has just ended."""
        self._recent.append((updated.num_tokens, self._now() - self._since, updated.loss))
        self._since = self._now()

    def pause(self) -> None:
        """Leave out the time since the last update, spent on something else."""
        self._since = self._now()

    @property
    def seconds(self) -> float:
        """Seconds since the beginning."""
        return self._now() - self.started_at

    @property
    def tokens_per_second(self) -> float:
        """The mean of recent updates; 0 before the first."""
        recent = list(self._recent)
        seconds = sum(seconds for _, seconds, _ in recent)
        return sum(count for count, _, _ in recent) / seconds if seconds else 0.0

    @property
    def loss(self) -> float | None:
        """The mean of the last few finite losses."""
        known = [loss for _, _, loss in list(self._recent) if math.isfinite(loss)]
        known = known[-_NUM_RECENT_LOSSES:]
        return sum(known) / len(known) if known else None

    def expect_seconds(self, num_updates: int) -> float | None:
        """Return how long so many updates will take; None before the first."""
        recent = list(self._recent)
        if not recent:
            return None
        return num_updates * sum(seconds for _, seconds, _ in recent) / len(recent)


class RunReporter:
    """Reports a fine-tuning run: a table of milestones for people, every event for programs.

    For people a line on stderr also moves with the updates.
    """

    def __init__(self, reporter: Reporter, now: Callable[[], float] = time.monotonic) -> None:
        self._reporter = reporter
        self._now = now
        self._meter = SpeedMeter(now)
        self._facts: RunFacts
        self._number = 0
        self._is_complete = False
        self._hops: Sequence[Hop] = ()
        self._missing: Callable[[], Sequence[Span]] = tuple

    def begin(self, facts: RunFacts, num_done: int) -> None:
        """Report the plan of a run, which continues after `num_done` updates."""
        self._facts, self._number = facts, num_done
        self._is_complete = num_done >= facts.num_updates
        self._reporter.tell(
            "begun",
            _describe_plan(self._reporter.output, facts, num_done),
            model=facts.model,
            method=facts.method,
            trainable_parameters=facts.num_trained,
            texts=facts.num_texts,
            evaluation_texts=facts.num_eval_texts,
            updates=facts.num_updates,
            updates_done=num_done,
            notices=list(facts.notices),
        )
        self._meter = SpeedMeter(self._now)

    def watching(self, missing: Callable[[], Sequence[Span]]) -> AbstractContextManager[object]:
        """Show the progress while inside; `missing` returns the blocks that no peer serves."""
        self._missing = missing
        if self._reporter.is_json:
            return nullcontext()
        return self._reporter.showing(self.describe, is_timed=False)

    def note_update(self, updated: "Updated", hops: Sequence["Hop"]) -> None:
        """Report an update and the hops that computed it."""
        self._meter.note(updated)
        self._number, self._hops = updated.number, hops or self._hops
        self._reporter.tell(
            "updated",
            self._describe_skipped(updated),
            update=updated.number,
            loss=_to_json(updated.loss),
            gradient_norm=_to_json(updated.gradient_norm),
            learning_rate=updated.rate,
            tokens=updated.num_tokens,
            tokens_per_second=round(self._meter.tokens_per_second, 2),
            skipped=updated.is_skipped,
            hops=route_facts(hops),
        )

    def note_failovers(self, number: int, failovers: Sequence["Failover"]) -> None:
        """Report the failovers of an update."""
        output = self._reporter.output
        for failover in failovers:
            lines = output.wrap(describe_pass_failover(number, failover))
            self._reporter.tell(
                "failover",
                [output.paint(line, "yellow") for line in lines],
                update=number,
                **pass_failover_facts(failover),
            )

    def note_milestone(self, milestone: "Milestone") -> None:
        """Report a checkpoint and, if there was one, its evaluation."""
        meter, loss = self._meter, milestone.eval_loss
        speed = f"{meter.tokens_per_second:,.0f}" if meter.tokens_per_second else "-"
        row = (
            f"{milestone.number:>9,} {_format_loss(meter.loss):>9} "
            f"{_format_loss(loss):>12} {speed:>8} {self._describe_rest():>11}"
        )
        self._reporter.tell(
            "saved",
            [] if self._is_complete else [row],
            update=milestone.number,
            evaluation_loss=loss and _to_json(loss),
        )
        meter.pause()

    def stop(self, num_updates: int) -> None:
        """Report that the run ended early, and how to continue it."""
        line = (
            f"Stopped after update {num_updates:,} of {self._facts.num_updates:,}. Repeat the "
            "command with --resume to continue."
        )
        self._reporter.tell("stopped", [line], update=num_updates)

    def finish(self, result: RunResult) -> None:
        """Report the result of a finished run."""
        evaluated = list(result.progress.eval_losses.values())
        took = "" if self._is_complete else f"Done in {format_seconds(self._meter.seconds)}."
        self._reporter.tell(
            "finished",
            _describe_result(self._reporter.output, result, took),
            adapter=str(result.adapter),
            plot=str(result.plot),
            losses=str(result.table),
            updates=result.progress.num_updates,
            evaluation_loss=_to_json(evaluated[-1]) if evaluated else None,
            seconds=round(self._meter.seconds, 3),
            use=result.use,
        )

    def describe(self) -> str:
        """Return the line that moves, without its spinner."""
        missing = ", ".join(map(str, self._missing()))
        if missing:
            return f"update {self._number + 1}: waiting for blocks {missing}"
        meter, total = self._meter, self._facts.num_updates
        if meter.loss is None:
            return f"update {self._number}/{total}"
        line = (
            f"{self._number}/{total}  loss {_format_loss(meter.loss)}  "
            f"{meter.tokens_per_second:,.0f} tok/s  {self._describe_rest()} left  "
        )
        return line + _name_peers([hop.peer.peer_id for hop in self._hops], _MAX_LINE - len(line))

    def _describe_rest(self) -> str:
        seconds = self._meter.expect_seconds(self._facts.num_updates - self._number)
        return "-" if seconds is None else format_seconds(seconds)

    def _describe_skipped(self, updated: "Updated") -> Iterator[str]:
        if updated.is_skipped:
            is_loss = not math.isfinite(updated.loss)
            what = "its loss is not finite" if is_loss else "its gradients are not finite"
            text = f"Update {updated.number} was skipped: {what}."
            yield self._reporter.output.paint(text, "yellow")


def _describe_plan(output: Terminal, facts: RunFacts, num_done: int) -> Iterator[str]:
    title = (
        f"Fine-tuning {facts.model} with {facts.method}: {facts.num_trained:,} trainable "
        f"parameters, {count_of(facts.num_texts, 'training text')}"
    )
    for line in output.wrap(title):
        yield output.paint(line, "bold")
    for notice in facts.notices:
        for line in output.wrap(notice):
            yield output.paint(line, "yellow")
    number = facts.num_eval_texts
    kept = f"; {count_of(number, 'text')} held out for evaluation" if number else ""
    done = f", {num_done:,} done" if num_done else ""
    updates = count_of(facts.num_updates, "update")
    texts = count_of(facts.texts_per_update, "text")
    yield from output.wrap(f"{updates} of {texts}{done}{kept}.")
    if num_done >= facts.num_updates:
        return
    yield ""
    yield output.paint("   update      loss   evaluation    tok/s   time left", "dim")


def _describe_result(output: Terminal, result: RunResult, took: str) -> Iterator[str]:
    yield ""
    evaluated = list(result.progress.eval_losses.values())
    change = (
        f" Evaluation loss: {evaluated[0]:.4f} before, {evaluated[-1]:.4f} after."
        if len(evaluated) > 1
        else ""
    )
    yield from output.wrap(f"{took}{change}".strip())
    yield from output.wrap(f"Trained weights: {result.adapter}; loss plot: {result.plot}")
    yield ""
    yield output.paint("Use it:", "bold")
    yield f"  {result.use}"
    if result.publish:
        yield ""
        yield output.paint("Let others use it, by the digest that this prints:", "bold")
        yield f"  {result.publish}"


def format_seconds(seconds: float) -> str:
    """Return a duration in one unit.

    >>> format_seconds(8.4), format_seconds(119.0), format_seconds(3600 * 1.75)
    ('8 s', '2 min', '1.8 h')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _name_peers(peer_ids: Sequence[str], room: int) -> str:
    """Return as many peers as there is room for, and how many more there are.

    >>> _name_peers(["12D3KooWAbCdEf", "12D3KooWGhIjKl", "12D3KooWMnOpQr"], 20)
    '…AbCdEf …GhIjKl +1'
    """
    names = [tail_of(peer_id) for peer_id in peer_ids]
    for count in range(len(names), 0, -1):
        more = [f"+{len(names) - count}"] if count < len(names) else []
        line = " ".join(names[:count] + more)
        if len(line) <= room:
            return line
    return ""


def make_result(
    tuning: "FinetuneRun", prompt: str, options: argparse.Namespace, joining: Joining
) -> RunResult:
    """Write the loss table and plot of a run whose trained weights are saved already."""
    progress, plot, table = tuning.progress, options.out / "losses.png", options.out / "losses.csv"
    save_losses(progress.losses, progress.eval_losses, table)
    title = f"{Path(options.model).name} fine-tuned on {options.data.name} ({options.method})"
    draw_losses(progress.losses, progress.eval_losses, title, plot)
    use, publish = quote_uses(options, prompt, joining.initial_peers)
    return RunResult(progress, options.out, plot, table, use, publish)


def quote_uses(
    options: argparse.Namespace, prompt: str, addresses: Sequence[str]
) -> tuple[str, str]:
    """Return commands that use trained weights and that publish them: none for prompts."""
    model, folder = shlex.quote(options.model), shlex.quote(str(options.out))
    generate = f'shoal generate {model} "{prompt}" --adapter {folder}'
    publish = f"shoal publish {model} {folder}"
    return (
        quote_command(generate, addresses, options.join),
        quote_command(publish, addresses, options.join) if options.method == "lora" else "",
    )


def _format_loss(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.4f}"


def _to_json(number: float) -> float | None:
    """Return None for NaN and infinities, which JSON cannot hold."""
    return number if math.isfinite(number) else None
