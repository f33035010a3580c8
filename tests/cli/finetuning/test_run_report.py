"""What a fine-tuning run shows: nothing wider than a terminal, nothing that is no JSON."""

from __future__ import annotations

import json
import math
import re
from argparse import Namespace
from array import array
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from screens import Screen

from shoal.cli.finetuning.loss_plot import draw_losses, save_losses
from shoal.cli.finetuning.run_report import RunFacts, RunReporter, RunResult, SpeedMeter, quote_uses
from shoal.cli.finetuning.run_texts import describe_limits
from shoal.cli.terminal.reporter import Reporter
from shoal.cli.terminal.terminal import Terminal
from shoal.client.finetuning.checkpoints import RunProgress
from shoal.client.finetuning.dataset import Dataset, Example
from shoal.client.finetuning.finetune_run import Milestone, Updated
from shoal.client.routing.route import Failover
from shoal.protocol.identity import Identity
from shoal.protocol.membership.join_code import JoinCode
from shoal.protocol.membership.membership import make_owner, make_public
from shoal.protocol.spans import Span

SECRET_CODE = str(JoinCode(make_owner(bytes(16))))
PUBLIC_CODE = str(JoinCode(make_public(bytes(16))))
HOPS: list[Any] = [
    SimpleNamespace(
        peer=SimpleNamespace(peer_id=Identity(bytes([number]) * 32).peer_id),
        span=Span(number, number + 1),
    )
    for number in range(5)
]
FACTS = RunFacts(
    "shoal-stories", "deep_ptune", 1_234_567, 98_765, 4_321, 123_456, 8,
    ["2,000 texts are longer than 512 tokens and truncated (--max-length)"],
)  # fmt: skip


def make_update(number: int, loss: float = 12.3456) -> Updated:
    return Updated(number, loss, 1e-3, 0.5 if math.isfinite(loss) else math.nan, 4096)


def make_result() -> RunResult:
    progress = RunProgress(3, [2.0, None, 1.0], {0: 2.5, 3: 1.25})
    folder = Path("out")
    return RunResult(progress, folder, folder / "losses.png", folder / "losses.csv", "shoal …")


def report_to(output: Screen, notices: Screen, is_json: bool = False) -> RunReporter:
    return RunReporter(Reporter(Terminal(output), Terminal(notices), is_json))


class Seconds:
    """A clock that stands still until it is set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_pace_is_that_of_recent_updates_without_what_came_between() -> None:
    clock = Seconds()
    meter = SpeedMeter(clock)
    assert (meter.tokens_per_second, meter.loss, meter.expect_seconds(5)) == (0.0, None, None)

    for number in range(1, 41):
        clock.now += 100 if number <= 20 else 2
        meter.note(make_update(number, loss=1.0 if number % 2 else math.nan))
        clock.now += 50  # an evaluation
        meter.pause()

    assert meter.tokens_per_second == 2048
    assert meter.expect_seconds(30) == 60
    assert meter.loss == 1.0


def test_pace_may_be_read_while_an_update_is_counted() -> None:
    """The line that moves is drawn on a thread of its own."""
    meter = SpeedMeter(Seconds())

    class Loss(int):
        def __float__(self) -> float:
            meter.note(make_update(2))  # as the other thread may at any time
            return 1.0

    meter.note(replace(make_update(1), loss=Loss(1)))
    assert meter.loss == 1.0


@pytest.mark.parametrize("num_hops", [0, 2, 5])
def test_lines_fit_a_terminal(num_hops: int) -> None:
    screen, notices = Screen(), Screen()
    clock = Seconds()
    reporter = RunReporter(Reporter(Terminal(screen), Terminal(notices), is_json=False), clock)
    reporter.begin(FACTS, 120_000)

    lines = []
    with reporter.watching(lambda: []):
        for number in range(120_001, 120_004):
            clock.now += 1.5
            reporter.note_update(make_update(number), HOPS[:num_hops])
            lines.append(reporter.describe())
        reporter.note_milestone(Milestone(120_003, 11.2345))
    reporter.finish(make_result())

    shown = re.sub(r"\x1b\[\d+m", "", screen.text).splitlines()
    assert max(map(len, shown)) <= 80
    assert "123,456 updates of 8 texts, 120,000 done; 4,321" in screen.text
    assert "  120,003   12.3456      11.2345" in screen.text
    assert "Evaluation loss: 2.5000 before, 1.2500 after." in screen.text
    assert max(map(len, lines)) + len("  * ") < 80
    begun = "120003/123456  loss 12.3456  2,731 tok/s  86 min left  "
    tails = [f"…{hop.peer.peer_id[-6:]}" for hop in HOPS]
    expected = {0: "", 2: f"{tails[0]} {tails[1]}", 5: f"{tails[0]} {tails[1]} +3"}
    assert lines[-1] == begun + expected[num_hops]


def test_complete_run_shows_no_table_and_no_time() -> None:
    screen = Screen()
    reporter = report_to(screen, Screen())

    reporter.begin(FACTS, 123_456)
    reporter.note_milestone(Milestone(123_456, None))
    reporter.finish(make_result())

    assert "time left" not in screen.text
    assert "Done" not in screen.text
    assert "\nEvaluation loss: 2.5000 before, 1.2500 after.\n" in screen.text
    assert "Use it:" in screen.text


def test_blocks_that_nobody_serves_are_named() -> None:
    reporter = report_to(Screen(), Screen())
    reporter.begin(FACTS, 0)

    with reporter.watching(lambda: [Span(4, 8)]):
        assert reporter.describe() == "update 1: waiting for blocks 4:8"


def test_skipped_updates_are_named() -> None:
    screen = Screen(is_terminal=False)
    reporter = report_to(screen, Screen(is_terminal=False))
    reporter.begin(FACTS, 0)

    reporter.note_update(make_update(7, math.nan), [])
    reporter.note_update(Updated(8, 1.0, 1e-3, math.inf, 9), [])

    assert "Update 7 was skipped: its loss is not finite." in screen.text
    assert "Update 8 was skipped: its gradients are not finite." in screen.text


def make_failover(*replacements: Any) -> Any:
    return Failover(HOPS[0], "peer …x fell silent", "did not answer in time", replacements)


def test_lost_peers_are_told_within_a_terminal() -> None:
    screen, notices = Screen(), Screen()
    reporter = report_to(screen, notices)
    reporter.begin(FACTS, 0)
    with reporter.watching(lambda: []):
        reporter.note_failovers(120_003, [make_failover(*HOPS[1:4]), make_failover()])

    shown = re.sub(r"\x1b\[\d+m", "", screen.text)
    assert max(map(len, shown.splitlines())) <= 80
    words = " ".join(shown.split())
    tails = [f"…{hop.peer.peer_id[-6:]}[{hop.span}]" for hop in HOPS]
    begun = f"failover at update 120003: {tails[0]} did not answer in time, "
    assert f"{begun}{' → '.join(tails[1:4])} took over" in words
    assert f"{begun}several others took over" in words


def test_stopped_run_says_how_to_go_on() -> None:
    screen = Screen()
    reporter = report_to(screen, Screen())
    reporter.begin(FACTS, 0)

    reporter.stop(57)

    assert screen.text.endswith(
        "Stopped after update 57 of 123,456. Repeat the command with --resume to continue.\n"
    )


def test_json_is_one_object_in_each_line() -> None:
    screen = Screen(is_terminal=False)
    reporter = report_to(screen, Screen(), is_json=True)

    reporter.begin(FACTS, 0)
    with reporter.watching(lambda: []):
        reporter.note_update(make_update(1), HOPS[:1])
        reporter.note_update(make_update(2, math.nan), [])
        reporter.note_failovers(2, [make_failover(HOPS[1])])
        reporter.note_milestone(Milestone(2, None))
    reporter.stop(2)
    reporter.finish(make_result())

    events: list[dict[str, Any]] = [json.loads(line) for line in screen.text.splitlines()]
    assert [event["event"] for event in events] == [
        "begun", "updated", "updated", "failover", "saved", "stopped", "finished"
    ]  # fmt: skip
    assert events[1]["hops"] == [{"peer_id": HOPS[0].peer.peer_id, "span": "0:1"}]
    assert (events[2]["loss"], events[2]["skipped"]) == (None, True)
    assert events[3] == {
        "event": "failover",
        "update": 2,
        "peer_id": HOPS[0].peer.peer_id,
        "span": "0:1",
        "reason": "peer …x fell silent",
        "replaced_by": [{"peer_id": HOPS[1].peer.peer_id, "span": "1:2"}],
    }
    assert events[4]["evaluation_loss"] is None
    assert (events[6]["evaluation_loss"], events[6]["adapter"]) == (1.25, "out")


def test_texts_that_were_cut_or_skipped_are_counted() -> None:
    text = Example(array("i", range(8)), array("b", [1] * 8))
    dataset = Dataset([text] * 1995, [text] * 5, 0, num_cut=2000, num_left_out=1)

    assert list(describe_limits(dataset, 8)) == [
        "2,000 of 2,001 texts are longer than 8 tokens and truncated (--max-length)",
        "1 of 2,001 texts is skipped: the first 8 tokens hold nothing to learn",
    ]
    assert not list(describe_limits(Dataset([], [], 0), 8))


@pytest.mark.parametrize(
    ("addresses", "code", "end"),
    [
        (["/ip4/a", "/ip4/b"], None, " --initial-peers /ip4/a /ip4/b"),
        ([], "@own code", " --join '@own code'"),
        (["/ip4/a"], SECRET_CODE, " --join shoal:… --initial-peers /ip4/a"),
        ([], PUBLIC_CODE, f" --join {PUBLIC_CODE}"),
        ([], None, ""),
    ],
)
def test_uses_name_the_swarm_and_tell_no_secret(
    addresses: list[str], code: str | None, end: str
) -> None:
    options = Namespace(model="a model", out=Path("my out"), method="lora", join=code)

    use, publish = quote_uses(options, "Once upon a time", addresses)

    assert use == f"shoal generate 'a model' \"Once upon a time\" --adapter 'my out'{end}"
    assert publish == f"shoal publish 'a model' 'my out'{end}"


def test_prompts_are_not_published() -> None:
    options = Namespace(model="m", out=Path("out"), method="ptune", join=None)

    assert quote_uses(options, "Once", [])[1] == ""


def test_losses_are_a_table_with_what_was_before(tmp_path: Path) -> None:
    path = tmp_path / "losses.csv"

    save_losses([2.0, None, 1.0], {0: 2.5, 3: 1.25}, path)

    assert path.read_text().split() == [
        "update,loss,evaluation_loss", "0,,2.5", "1,2.0,", "2,,", "3,1.0,1.25"
    ]  # fmt: skip


def test_plot_of_the_same_losses_is_the_same_file(tmp_path: Path) -> None:
    losses = [5 / (1 + number) if number % 7 else None for number in range(200)]
    files = [tmp_path / name for name in ("one.png", "same.png", "other.png")]

    for file, first in zip(files, (0.5, 0.5, 0.75), strict=True):
        draw_losses([first, *losses], {0: 5.0, 200: 0.1}, "a title", file)

    one, same, other = (file.read_bytes() for file in files)
    assert one.startswith(b"\x89PNG")
    assert one == same != other


def test_plot_shows_the_entropy_of_the_corpus(tmp_path: Path) -> None:
    draw_losses([3.0, 2.0], {}, "a title", tmp_path / "one.svg", entropy=0.1825)

    assert "entropy of the corpus, 0.182" in (tmp_path / "one.svg").read_text()


def test_plot_of_few_losses_is_drawn(tmp_path: Path) -> None:
    draw_losses([None], {}, "nothing learned", tmp_path / "none.png")
    draw_losses([1.0], {}, "one", tmp_path / "one.png")

    assert (tmp_path / "one.png").stat().st_size > 1000
