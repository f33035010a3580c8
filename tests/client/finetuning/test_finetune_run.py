"""The loop of a run: what it learns, that it goes on exactly, and what it refuses."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from shoal.client.finetuning.checkpoints import RunProgress
from shoal.client.finetuning.dataset import Batch, Dataset, Example
from shoal.client.finetuning.finetune_run import (
    FinetuneRun,
    Learner,
    Milestone,
    RunConfig,
    SpoiltRunError,
    Updated,
)
from shoal.protocol.errors import (
    ErrorCode,
    RefusedError,
    RouteError,
    ShoalError,
    UnavailableError,
    UsageError,
)

VOCABULARY = 12
CONFIG = RunConfig(
    num_updates=12, learning_rate=0.05, batch_rows=3, num_warmup_updates=2, eval_period=4
)


class Bigrams(Learner):
    """A model that guesses a token by the one before it, of which only some numbers learn."""

    def __init__(self, name: str = "bigrams") -> None:
        generator = torch.Generator().manual_seed(5)
        self.scores = nn.Parameter(torch.randn(VOCABULARY, VOCABULARY, generator=generator))
        self.name = name
        self.bad_updates: set[int] = set()
        self.num_losses = 0

    @property
    def facts(self) -> Mapping[str, Any]:
        return {"method": self.name}

    def named_parameters(self) -> Mapping[str, nn.Parameter]:
        return {"scores": self.scores}

    def compute_loss(self, batch: Batch) -> Tensor:
        logits = self.scores[batch.input_ids_BT[:, :-1]]
        loss = F.cross_entropy(logits.flatten(0, 1), batch.labels_BT[:, 1:].flatten())
        if torch.is_grad_enabled():
            self.num_losses += 1
        return loss * math.nan if self.num_losses in self.bad_updates else loss

    def save(self, folder: Path) -> None:
        save_file({"scores": self.scores.data}, folder / "bigrams.safetensors")

    def load(self, folder: Path) -> None:
        self.scores.data = load_file(folder / "bigrams.safetensors")["scores"]


def make_texts(seed: int = 0, num_texts: int = 20, num_evaluated: int = 4) -> Dataset:
    generator = torch.Generator().manual_seed(seed)
    examples = []
    for index in range(num_texts):
        start = int(torch.randint(0, VOCABULARY, (1,), generator=generator))
        ids = [(start + 5 * place) % VOCABULARY for place in range(3 + index % 4)]
        examples.append(Example(array("i", ids), array("b", [1] * len(ids))))
    return Dataset(examples[num_evaluated:], examples[:num_evaluated], padding_id=0)


def make_run(folder: Path, learner: Bigrams | None = None, **changes: Any) -> FinetuneRun:
    return FinetuneRun(learner or Bigrams(), make_texts(), replace(CONFIG, **changes), folder)


def test_run_learns_and_reports_every_update_and_evaluation(tmp_path: Path) -> None:
    run = make_run(tmp_path, num_updates=60, eval_period=20)

    events = list(run.learn())

    updates = [event for event in events if isinstance(event, Updated)]
    evaluations = [event for event in events if isinstance(event, Milestone)]
    assert [update.number for update in updates] == list(range(1, 61))
    assert [evaluation.number for evaluation in evaluations] == [0, 20, 40, 60]
    assert run.progress.eval_losses[60] < 0.5 * run.progress.eval_losses[0]
    assert updates[-1].loss < 0.5 * updates[0].loss
    assert run.progress.losses == [update.loss for update in updates]
    assert updates[1].rate == CONFIG.learning_rate > updates[0].rate
    assert updates[-1].rate < 0.01 * CONFIG.learning_rate


def test_two_runs_are_the_same_to_the_bit(tmp_path: Path) -> None:
    learner = [Bigrams(), Bigrams()]

    runs = [list(make_run(tmp_path / str(index), one).learn()) for index, one in enumerate(learner)]

    assert runs[0] == runs[1]
    assert torch.equal(learner[0].scores, learner[1].scores)


@pytest.mark.parametrize("stop", [1, 4, 7])
def test_resumed_run_goes_on_exactly(tmp_path: Path, stop: int) -> None:
    expected = Bigrams()
    whole = make_run(tmp_path / "whole", expected)
    events = list(whole.learn())
    first = make_run(tmp_path / "parts")
    for event in first.learn():
        if isinstance(event, Updated) and event.number == stop:
            break
    first.save_checkpoint()

    learner = Bigrams()
    second = make_run(tmp_path / "parts", learner)
    second.resume()
    rest = list(second.learn())

    expected_rest = [
        event
        for event in events
        if event.number > stop or (event.number == stop and isinstance(event, Milestone))
    ]
    assert rest == expected_rest
    assert torch.equal(learner.scores, expected.scores)
    assert second.progress == whole.progress


def test_accumulated_gradients_are_those_of_one_large_batch(tmp_path: Path) -> None:
    at_once, in_parts = Bigrams(), Bigrams()

    large = make_run(tmp_path / "a", at_once, batch_rows=6, num_updates=3)
    small = make_run(tmp_path / "b", in_parts, batch_rows=2, num_accumulated=3, num_updates=3)
    for run in (large, small):
        list(run.learn())

    # Texts differ in length: a mean of means would be another one.
    torch.testing.assert_close(at_once.scores, in_parts.scores, rtol=1e-5, atol=1e-6)
    assert large.progress.losses == pytest.approx(small.progress.losses)


def test_updates_go_as_far_as_the_schedule_says(tmp_path: Path) -> None:
    learner = Bigrams()
    before = learner.scores.detach().clone()

    next(event for event in make_run(tmp_path, learner).learn() if isinstance(event, Updated))

    # The first update of Adam goes as far as its rate, here half of the highest.
    moved = float((learner.scores.detach() - before).abs().max())
    assert moved == pytest.approx(CONFIG.learning_rate / 2, rel=1e-3)


def test_gradients_are_clipped_and_their_length_reported_as_it_was(tmp_path: Path) -> None:
    learner = Bigrams()

    updated = list(make_run(tmp_path, learner, max_gradient_norm=0.01, num_updates=1).learn())[1]

    assert isinstance(updated, Updated)
    assert updated.gradient_norm > 0.05
    assert learner.scores.grad is not None
    assert float(learner.scores.grad.norm()) == pytest.approx(0.01, rel=1e-3)


def test_update_without_a_finite_loss_is_skipped_and_changes_nothing(tmp_path: Path) -> None:
    learner = Bigrams()
    learner.bad_updates = {2}
    run = make_run(tmp_path, learner)
    before = learner.scores.detach().clone()

    seen: dict[int, tuple[bool, Tensor]] = {}
    for event in run.learn():
        if isinstance(event, Updated):
            seen[event.number] = event.is_skipped, learner.scores.detach().clone()
            # What is no number is not taken back either: peers would refuse it.
            assert (learner.scores.grad is None) == event.is_skipped

    assert [number for number, (is_skipped, _) in seen.items() if is_skipped] == [2]
    assert torch.equal(seen[1][1], seen[2][1])
    assert not torch.equal(before, seen[1][1])
    assert not torch.equal(seen[2][1], seen[3][1])
    assert run.progress.losses[1] is None
    assert all(parameter.isfinite().all() for parameter in learner.named_parameters().values())


def test_run_without_finite_losses_ends_with_advice_and_can_be_resumed(tmp_path: Path) -> None:
    learner = Bigrams()
    learner.bad_updates = {6, 7, 8}
    run = make_run(tmp_path, learner)

    with pytest.raises(
        SpoiltRunError, match=r"3 updates in a row .* --learning-rate much below 0.05"
    ):
        list(run.learn())

    assert learner.scores.isfinite().all()
    assert run.checkpoints.find()[-1].name == "checkpoint-000004"
    later = make_run(tmp_path, learning_rate=0.01)
    later.resume()
    assert later.progress.num_updates == 4
    assert list(later.learn())[-1].number == 12


def test_updates_that_are_skipped_take_no_place_of_a_checkpoint(tmp_path: Path) -> None:
    """What was learned before the first of them may be why, and only two are kept."""
    learner = Bigrams()
    run = make_run(tmp_path, learner, eval_period=1)
    events = run.learn()
    while next(events) != Milestone(5, run.progress.eval_losses.get(5)):
        pass
    learner.bad_updates = set(range(learner.num_losses + 1, learner.num_losses + 9))

    with pytest.raises(
        SpoiltRunError, match=r"delete .*checkpoint-000005, and continue .* --resume"
    ):
        list(events)

    assert [path.name for path in run.checkpoints.find()] == [
        "checkpoint-000004", "checkpoint-000005"
    ]  # fmt: skip


def test_run_that_peers_refuse_to_go_on_with_keeps_what_was_learned_before(tmp_path: Path) -> None:
    learner = Bigrams()
    run = make_run(tmp_path, learner)
    events = run.learn()
    for event in events:
        if isinstance(event, Updated) and event.number == 5:
            break

    def refuse(batch: Batch) -> Tensor:
        raise RefusedError(code, "the blocks overflow")

    learner.compute_loss = refuse  # type: ignore[method-assign]
    code = ErrorCode.BAD_VALUES
    with pytest.raises(
        SpoiltRunError, match=r"after update 5: .* too high: .*--resume .* below 0.05"
    ):
        next(events)
    assert [path.name for path in run.checkpoints.find()] == [
        "checkpoint-000000",
        "checkpoint-000004",
    ]

    again = make_run(tmp_path, learner)
    again.resume()
    with pytest.raises(
        SpoiltRunError, match=r"delete .*checkpoint-000004, and continue .* --resume"
    ):
        next(again.learn())

    code = ErrorCode.BUSY
    with pytest.raises(RefusedError, match="overflow"):
        next(make_run(tmp_path / "other", learner).learn())


@pytest.mark.parametrize("error", [RouteError("nobody is there", []), UsageError("in an update")])
def test_state_that_cannot_be_had_leaves_the_last_checkpoint(
    tmp_path: Path, error: ShoalError
) -> None:
    learner = Bigrams()
    run = make_run(tmp_path, learner)
    for event in run.learn():
        if isinstance(event, Updated) and event.number == 5:
            break

    def fail(folder: Path) -> None:
        raise error

    learner.save = fail  # type: ignore[method-assign]
    assert run.save_last_checkpoint() == 4
    assert run.checkpoints.find()[-1].name == "checkpoint-000004"


def test_last_two_checkpoints_are_kept_and_hold_no_pickles(tmp_path: Path) -> None:
    run = make_run(tmp_path)

    list(run.learn())

    found = run.checkpoints.find()
    assert [path.name for path in found] == ["checkpoint-000008", "checkpoint-000012"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [path.name for path in found]
    assert sorted(path.name for path in found[-1].iterdir()) == [
        "bigrams.safetensors", "optimizer.safetensors", "state.json"
    ]  # fmt: skip


def test_checkpoint_just_written_stays_whatever_else_is_there(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.save_checkpoint()
    for number in (6, 12):
        (tmp_path / f"checkpoint-{number:06}").mkdir()

    written = run.checkpoints.save(RunProgress(3), lambda folder: None)

    assert written.is_dir()
    assert [path.name for path in run.checkpoints.find()] == [
        "checkpoint-000003", "checkpoint-000006", "checkpoint-000012"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "error",
    [OSError(28, "No space left on device"), SafetensorError("I/O: No space left on device")],
)
def test_checkpoint_that_cannot_be_written_leaves_the_last_one(
    tmp_path: Path, error: Exception
) -> None:
    run = make_run(tmp_path)
    run.save_checkpoint()

    def fail(folder: Path) -> None:
        (folder / "half").write_text("")
        raise error

    words = r"cannot write to .*checkpoint-000003: .*No space left on device"
    with pytest.raises(UnavailableError, match=words):
        run.checkpoints.save(RunProgress(3), fail)

    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-000000"]
    run.checkpoints.save(RunProgress(3), lambda folder: None)
    assert [path.name for path in run.checkpoints.find()] == [
        "checkpoint-000000", "checkpoint-000003"
    ]  # fmt: skip
    assert not (tmp_path / "checkpoint-000003" / "half").exists()


def test_result_is_what_learned_beside_the_checkpoints(tmp_path: Path) -> None:
    learner = Bigrams()
    run = make_run(tmp_path, learner)

    list(run.learn())
    run.save_result()

    stored = load_file(tmp_path / "bigrams.safetensors")["scores"]
    assert torch.equal(stored, learner.scores)


@pytest.mark.parametrize(
    ("changes", "learner", "sentence"),
    [
        ({"seed": 1}, Bigrams(), "differs in seed: 0 there, 1 here"),
        ({"batch_rows": 2}, Bigrams(), "differs in texts per update: 3 there, 2 here"),
        ({"seed": 1}, Bigrams("others"), "in method: bigrams there, others here, and in seed: 0"),
    ],
)
def test_run_goes_on_only_with_what_it_began_with(
    tmp_path: Path, changes: dict[str, Any], learner: Bigrams, sentence: str
) -> None:
    list(make_run(tmp_path).learn())

    with pytest.raises(UsageError, match=sentence):
        make_run(tmp_path, learner, **changes).resume()


def test_run_does_not_go_on_with_other_texts(tmp_path: Path) -> None:
    list(make_run(tmp_path).learn())

    with pytest.raises(UsageError, match="differs in texts"):
        FinetuneRun(Bigrams(), make_texts(seed=1), CONFIG, tmp_path).resume()


def test_run_that_never_began_cannot_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no checkpoint in .*leave out --resume"):
        make_run(tmp_path / "none").resume()


@pytest.mark.parametrize("file", ["state.json", "optimizer.safetensors"])
@pytest.mark.parametrize("content", ["", "{}", '{"losses": 3, "eval_losses": {}}', None])
def test_damaged_checkpoints_are_named(tmp_path: Path, file: str, content: str | None) -> None:
    list(make_run(tmp_path).learn())
    path = tmp_path / "checkpoint-000012" / file
    path.unlink() if content is None else path.write_text(content)

    with pytest.raises(UsageError, match=r"checkpoint-000012 is damaged .*; delete it"):
        make_run(tmp_path).resume()


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("step", None, "lacks step of scores"),
        ("exp_avg", None, "lacks exp_avg of scores"),
        ("exp_avg_sq", torch.zeros(3), "exp_avg_sq of scores .* another shape"),
        ("exp_avg", torch.zeros(12, 12, dtype=torch.int32), "another shape or type"),
        ("exp_avg_sq", torch.full((12, 12), -1.0), "holds NaN, infinity or negative values"),
        ("step", torch.tensor(math.inf), "holds NaN, infinity or negative values"),
    ],
)
def test_optimizer_that_is_incomplete_or_no_numbers_is_refused(
    tmp_path: Path, key: str, value: Tensor | None, sentence: str
) -> None:
    list(make_run(tmp_path).learn())
    path = tmp_path / "checkpoint-000012" / "optimizer.safetensors"
    tensors = load_file(path)
    tensors.pop(f"scores/{key}")
    save_file(tensors if value is None else {**tensors, f"scores/{key}": value}, path)

    with pytest.raises(UsageError, match=f"checkpoint-000012 is damaged .*{sentence}.*; delete it"):
        make_run(tmp_path).resume()


def test_run_whose_updates_were_all_skipped_goes_on(tmp_path: Path) -> None:
    learner = Bigrams()
    learner.bad_updates = {1, 2}
    run = make_run(tmp_path, learner)
    next(event for event in run.learn() if isinstance(event, Updated) and event.number == 2)
    run.save_checkpoint()

    later = make_run(tmp_path)
    later.resume()

    assert later.progress.losses == [None, None]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"learning_rate": 0.01}, "learning rate was 0.05; it is now 0.01"),
        ({"schedule": "linear"}, "schedule was cosine; it is now linear"),
        ({"num_updates": 14}, "number of updates was 12; it is now 14"),
        (
            {"num_updates": 24, "num_warmup_updates": 4},
            "number of updates was 12; it is now 24",
        ),
        ({"num_warmup_updates": 0}, "number of updates to warm up was 2; it is now 0"),
        ({"weight_decay": 0.1}, "weight decay was 0.0; it is now 0.1"),
        ({"max_gradient_norm": 2.0}, "limit of gradients was 1.0; it is now 2.0"),
    ],
)
def test_resumed_run_says_which_settings_are_others(
    tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    make_run(tmp_path).save_checkpoint()
    same, other = make_run(tmp_path), make_run(tmp_path, **changes)

    assert same.resume() == []
    assert other.resume() == [f"The {sentence}."]

    other.save_checkpoint()
    assert make_run(tmp_path, **changes).resume() == []


def test_checkpoints_keep_the_options_that_a_run_has_now(tmp_path: Path) -> None:
    def make(options: dict[str, str]) -> FinetuneRun:
        return FinetuneRun(Bigrams(), make_texts(), CONFIG, tmp_path, options=options)

    make({"rank": "4"}).save_checkpoint()
    later = make({"rank": "4", "wait": "5"})
    before = later.checkpoints.load_newest().options
    later.resume()
    later.save_checkpoint()

    assert before == {"rank": "4"}
    assert later.checkpoints.load_newest().options == {"rank": "4", "wait": "5"}


def test_finished_run_has_nothing_left_to_do_and_may_be_made_longer(tmp_path: Path) -> None:
    list(make_run(tmp_path).learn())
    again, longer = make_run(tmp_path), make_run(tmp_path, num_updates=14)
    again.resume()
    longer.resume()

    assert list(again.learn()) == []
    assert [event.number for event in longer.learn() if isinstance(event, Updated)] == [13, 14]
