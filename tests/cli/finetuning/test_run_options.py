"""What `shoal finetune` takes for options that nobody gave: those of the run that goes on."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from shoal.cli.finetuning.run_options import record_options, settle_options
from shoal.cli.main import _parse
from shoal.protocol.errors import UsageError

FIRST = (
    "--method lora --rank 2 --target-modules q_proj,v_proj --learning-rate 0.01 --updates 12 "
    "--batch-size 4 --accumulate 2 --schedule linear --warmup 0.5 --weight-decay 0.125 --clip 2 "
    "--max-length 64 --eval 0 --eval-every 5 --seed 7 --optimizer peers"
)


def settle(line: str, recorded: dict[str, str] | None = None) -> argparse.Namespace:
    options = _parse(["finetune", "m", "--data", "d", "--out", "o", *line.split()])
    settle_options(options, recorded or {})
    return options


def read(options: argparse.Namespace) -> dict[str, Any]:
    """Return what decides how a run learns."""
    others = {"run", "command", "model", "data", "out", "resume", "join", "initial_peers", "words"}
    return {name: value for name, value in vars(options).items() if name not in others}


@pytest.mark.parametrize("line", [FIRST, "", "--method deep_ptune --pre-seq-len 3 --epochs 0.5"])
def test_run_goes_on_with_its_own_options(line: str) -> None:
    first = settle(line)

    again = settle("--resume", record_options(first))

    assert read(again) == read(first)


def test_what_is_given_counts_for_more() -> None:
    recorded = record_options(settle(FIRST))

    again = settle("--resume --learning-rate 0.5 --seed 0 --eval 0.25", recorded)

    assert (again.learning_rate, again.seed, again.eval) == (0.5, 0, 0.25)
    assert (again.rank, again.clip) == (2, 2.0)


def test_another_rank_is_no_other_alpha() -> None:
    recorded = record_options(settle("--rank 8"))

    again = settle("--resume --rank 4", recorded)

    assert (again.rank, again.alpha) == (4, 16)


@pytest.mark.parametrize(
    ("first", "given", "expected"),
    [
        ("--updates 12", "--epochs 2", (None, 2.0)),
        ("--epochs 2", "--updates 12", (12, None)),
        ("--epochs 2", "", (None, 2.0)),
    ],
)
def test_length_of_a_run_is_one_of_two_options(
    first: str, given: str, expected: tuple[int | None, float]
) -> None:
    again = settle(f"--resume {given}", record_options(settle(first)))

    assert (again.updates, again.epochs) == expected


def test_sizes_of_another_method_are_refused() -> None:
    recorded = record_options(settle("--method lora --rank 2"))

    again = settle("--resume --method ptune", recorded)

    assert (again.method, again.pre_seq_len) == ("ptune", 16)
    with pytest.raises(UsageError, match=r"--pre-seq-len is for .*, not lora"):
        settle("--resume --pre-seq-len 3", recorded)


@pytest.mark.parametrize("recorded", [{"rank": "-1"}, {"method": "magic"}, {"clip": "much"}])
def test_damaged_record_is_one_sentence(recorded: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="recorded in the checkpoint are damaged: argument --"):
        settle("--resume", recorded)


def test_record_without_options_is_one_of_an_older_run() -> None:
    assert read(settle("--resume", {}))["rank"] == 8
