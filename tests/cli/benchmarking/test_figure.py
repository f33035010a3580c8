"""Measured numbers, and how they are shown."""

import math

import pytest
import torch

from shoal.cli.benchmarking.figure import Figure, describe_machine, round_to_digits


@pytest.mark.parametrize(
    ("value", "rounded"),
    [(0.0, 0.0), (0.0012346, 0.001235), (-12.3456, -12.35), (123456.7, 123457.0)],
)
def test_figures_are_rounded_to_digits_that_count(value: float, rounded: float) -> None:
    assert round_to_digits(value, 4) == rounded


def test_what_is_no_number_stays_none() -> None:
    assert math.isnan(round_to_digits(math.nan, 4))
    assert round_to_digits(-math.inf, 4) == -math.inf


def test_figure_is_told_to_programs_and_people_with_the_same_digits() -> None:
    figure = Figure("median step", 12.34567, "ms")

    assert figure.to_json() == {"name": "median step", "value": 12.35, "unit": "ms"}
    assert figure.to_line().split() == ["median", "step", "12.35", "ms"]


def test_machine_is_described_in_a_line_with_its_torch() -> None:
    line = describe_machine()

    assert "\n" not in line
    assert line.endswith(f"torch {torch.__version__}")
