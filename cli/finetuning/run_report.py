"""What a fine-tuning run shows: a table that stays, a line that moves, or lines of JSON."""

import json
import math
import shlex
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..options.joining import quote_swarm
from ..options.quantities import count_of
from ..remote_models.routes import (
    describe_pass_failover,
    pass_failover_facts,
    route_facts,
    tail_of,
)
from ..terminal.terminal import Progress, Terminal

if TYPE_CHECKING:
    from ...client.learning.checkpoints import Progress as RunProgress
    from ...client.learning.finetune_run import Milestone, Updated

_NUM_RECENT = 20
"""Updates that the speed is said of."""

_NUM_RECENT_LOSSES = 5

_MAX_LINE = 74
"""Columns of a terminal with 80, without the sign before the line."""

Hops = Sequence[Any]


@dataclass(frozen=True)
class RunFacts:
    """What a run is about."""

    model: str
    method: str
    num_trained: int
    """Numbers that learn."""
    num_texts: int
    num_eval_texts: int
    num_updates: int
    texts_per_update: int
    folder: Path
    notices: Sequence[str] = ()


@dataclass(frozen=True)
class RunResult:
    """What came of a run that is done."""

    progress: "RunProgress"
    adapter: Path
    plot: Path
    table: Path
    use: Sequence[str]
    """The lines of a command that uses it."""


class Pace:
    """How fast a run is, by its recent updates."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._since = self.started_at = now()
        self._recent: deque[tuple[int, float, float]] = deque(maxlen=_NUM_RECENT)
        self.num_tokens = 0

    def note(self, updated: "Updated") -> None:
        """Count an update that has just ended."""
        self._recent.append((updated.num_tokens, self._now() - self._since, updated.loss))
        self.num_tokens += updated.num_tokens
        self._since = self._now()

    def pause(self) -> None:
        """Leave out what was no update since the last one."""
        self._since = self._now()

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return self._now() - self.started_at

    @property
    def tokens_per_second(self) -> float:
        """Of recent updates; 0 before the first."""
        seconds = sum(seconds for _, seconds, _ in self._recent)
        return sum(count for count, _, _ in self._recent) / seconds if seconds else 0.0

    @property
    def loss(self) -> float | None:
        """The mean of the last few that are numbers."""
        known = [loss for _, _, loss in self._recent if math.isfinite(loss)][-_NUM_RECENT_LOSSES:]
        return sum(known) / len(known) if known else None

    def expect_seconds(self, num_updates: int) -> float | None:
        """Return how long so many updates will take; None before the first."""
        if not self._recent:
            return None
        return num_updates * sum(seconds for _, seconds, _ in self._recent) / len(self._recent)


class Reporter(Protocol):
    """Says how a run goes."""

    def begin(self, facts: RunFacts, num_done: int) -> None:
        """Say what is about to begin, or to go on after so many updates."""

    def watching(self, missing: Callable[[], Sequence[Any]]) -> AbstractContextManager[Any]:
        """Show how far it is, while inside; `missing` tells the blocks that nobody serves."""
        ...

    def note_update(self, updated: "Updated", hops: Hops) -> None:
        """Take down an update, and who computed for it."""

    def note_failovers(self, number: int, failovers: Sequence[Any]) -> None:
        """Say who was lost in an update, and who took over."""

    def note_milestone(self, milestone: "Milestone") -> None:
        """Take down a checkpoint, and an evaluation."""

    def stop(self, num_updates: int) -> None:
        """Say that it ended too soon, and how to go on."""

    def finish(self, result: RunResult) -> None:
        """Say what came of it."""


class _RunLine(Progress):
    """Says how long is left, and so not how long it took."""

    def _compose(self) -> str:
        return self._describe()


class Screen:
    """Tells people."""

    def __init__(
        self, output: Terminal, notices: Terminal, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._output = output
        self._now = now
        self._pace = Pace(now)
        self._facts: RunFacts
        self._number = 0
        self._hops: Hops = ()
        self._missing: Callable[[], Sequence[Any]] = tuple
        self._line = _RunLine(notices, self.describe)

    def begin(self, facts: RunFacts, num_done: int) -> None:
        self._facts, self._number = facts, num_done
        show, paint = self._output.print, self._output.paint
        title = (
            f"Fine-tuning {facts.model} with {facts.method}: {facts.num_trained:,} trainable "
            f"parameters, {count_of(facts.num_texts, 'text')}"
        )
        for line in self._output.wrap(title):
            show(paint(line, "bold"))
        for notice in facts.notices:
            for line in self._output.wrap(notice):
                show(paint(line, "yellow"))
        number = facts.num_eval_texts
        kept = f"; {count_of(number, 'text')} held out for evaluation"
        done = f", {num_done:,} done" if num_done else ""
        updates = count_of(facts.num_updates, "update")
        texts = count_of(facts.texts_per_update, "text")
        plan = f"{updates} of {texts}{done}{kept if number else ''}."
        for line in self._output.wrap(plan):
            show(line)
        show()
        show(paint("   update      loss   evaluation    tok/s   time left", "dim"))
        self._pace = Pace(self._now)

    def watching(self, missing: Callable[[], Sequence[Any]]) -> AbstractContextManager[Any]:
        self._missing = missing
        return self._line

    def note_update(self, updated: "Updated", hops: Hops) -> None:
        self._pace.note(updated)
        self._number, self._hops = updated.number, hops or self._hops
        if updated.is_skipped:
            is_loss = not math.isfinite(updated.loss)
            what = "its loss is not finite" if is_loss else "its gradients are not finite"
            text = f"Update {updated.number} was skipped: {what}."
            self._print(self._output.paint(text, "yellow"))

    def note_failovers(self, number: int, failovers: Sequence[Any]) -> None:
        for failover in failovers:
            for line in self._output.wrap(describe_pass_failover(number, failover)):
                self._print(self._output.paint(line, "yellow"))

    def note_milestone(self, milestone: "Milestone") -> None:
        pace = self._pace
        speed = f"{pace.tokens_per_second:,.0f}" if pace.tokens_per_second else "-"
        self._print(
            f"{milestone.number:>9,} {_format_loss(pace.loss):>9} "
            f"{_format_loss(milestone.eval_loss):>12} {speed:>8} {self._describe_rest():>11}"
        )
        pace.pause()

    def stop(self, num_updates: int) -> None:
        self._output.print(
            f"Stopped after update {num_updates:,} of {self._facts.num_updates:,}. Repeat the "
            "command with --resume to continue."
        )

    def finish(self, result: RunResult) -> None:
        show, pace = self._output.print, self._pace
        show()
        evaluated = list(result.progress.eval_losses.values())
        change = (
            f" Evaluation loss: {evaluated[0]:.4f} before, {evaluated[-1]:.4f} after."
            if len(evaluated) > 1
            else ""
        )
        done = f"Done in {format_seconds(pace.seconds)}.{change}"
        files = f"Trained weights: {result.adapter}; loss plot: {result.plot}"
        for text in (done, files):
            for line in self._output.wrap(text):
                show(line)
        show()
        show(self._output.paint("Use it:", "bold"))
        for line in result.use:
            show(f"  {line}")

    def _print(self, line: str) -> None:
        with self._line.making_room():
            self._output.print(line)

    def describe(self) -> str:
        """Return the line that moves, without its sign and its seconds."""
        missing = ", ".join(map(str, self._missing()))
        if missing:
            return f"update {self._number + 1}: waiting for blocks {missing}"
        pace, total = self._pace, self._facts.num_updates
        if pace.loss is None:
            return f"update {self._number}/{total}"
        line = (
            f"{self._number}/{total}  loss {_format_loss(pace.loss)}  "
            f"{pace.tokens_per_second:,.0f} tok/s  {self._describe_rest()} left  "
        )
        return line + _name_peers([hop.peer.peer_id for hop in self._hops], _MAX_LINE - len(line))

    def _describe_rest(self) -> str:
        seconds = self._pace.expect_seconds(self._facts.num_updates - self._number)
        return "-" if seconds is None else format_roughly(seconds)


class JsonLines:
    """Tells programs: an object in each line."""

    def __init__(self, output: Terminal) -> None:
        self._output = output
        self._pace = Pace()

    def begin(self, facts: RunFacts, num_done: int) -> None:
        self._pace = Pace()
        self._print(
            "begun",
            model=facts.model,
            method=facts.method,
            trained_numbers=facts.num_trained,
            texts=facts.num_texts,
            evaluation_texts=facts.num_eval_texts,
            updates=facts.num_updates,
            updates_done=num_done,
            notices=list(facts.notices),
        )

    def watching(self, missing: Callable[[], Sequence[Any]]) -> AbstractContextManager[Any]:
        return nullcontext()

    def note_update(self, updated: "Updated", hops: Hops) -> None:
        self._pace.note(updated)
        self._print(
            "updated",
            update=updated.number,
            loss=_to_json(updated.loss),
            gradient_norm=_to_json(updated.gradient_norm),
            learning_rate=updated.rate,
            tokens=updated.num_tokens,
            tokens_per_second=round(self._pace.tokens_per_second, 2),
            skipped=updated.is_skipped,
            hops=route_facts(hops),
        )

    def note_failovers(self, number: int, failovers: Sequence[Any]) -> None:
        for failover in failovers:
            self._print("failover", update=number, **pass_failover_facts(failover))

    def note_milestone(self, milestone: "Milestone") -> None:
        self._pace.pause()
        loss = milestone.eval_loss
        self._print("saved", update=milestone.number, evaluation_loss=loss and _to_json(loss))

    def stop(self, num_updates: int) -> None:
        self._print("stopped", update=num_updates)

    def finish(self, result: RunResult) -> None:
        evaluated = list(result.progress.eval_losses.values())
        self._print(
            "finished",
            adapter=str(result.adapter),
            plot=str(result.plot),
            losses=str(result.table),
            updates=result.progress.num_updates,
            evaluation_loss=_to_json(evaluated[-1]) if evaluated else None,
            seconds=round(self._pace.seconds, 3),
            use=" ".join(line.removesuffix("\\").strip() for line in result.use),
        )

    def _print(self, event: str, **facts: object) -> None:
        self._output.print(json.dumps({"event": event, **facts}))


def make_reporter(wants_json: bool) -> Reporter:
    """Return who tells it on this process's streams."""
    output = Terminal(sys.stdout)
    return JsonLines(output) if wants_json else Screen(output, Terminal(sys.stderr))


def format_seconds(seconds: float) -> str:
    """Return a duration as people say it.

    >>> format_seconds(8.4), format_seconds(119.0), format_seconds(3600 * 1.75)
    ('8 s', '1 min 59 s', '1 h 45 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def format_roughly(seconds: float) -> str:
    """Return a duration in one unit.

    >>> format_roughly(8.4), format_roughly(119.0), format_roughly(3600 * 1.75)
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


def quote_use(
    model: str, prompt: str, folder: Path, addresses: Sequence[str], code: str | None
) -> list[str]:
    """Return the lines that use an adapter, in the swarm as it was given; a code stays a secret.

    >>> quote_use("shoal-stories", "Once upon a time", Path("out"), [], "@own.code")
    ['shoal generate shoal-stories "Once upon a time" --adapter out --join @own.code']
    """
    adapter = shlex.quote(str(folder))
    line = f'shoal generate {shlex.quote(model)} "{prompt}" --adapter {adapter}'
    swarm = quote_swarm(addresses, code)
    if code is None and addresses:
        return [f"{line} \\", f"  {swarm}"]
    return [f"{line} {swarm}".rstrip()]


def _format_loss(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.4f}"


def _to_json(number: float) -> float | None:
    """JSON has no word for what is no number."""
    return number if math.isfinite(number) else None
