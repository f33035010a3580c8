"""Combinations of parameters of which some are tested always and the others are thorough."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import product
from typing import Any

import pytest


def choose_cases(chosen: Collection[tuple[Any, ...]], *values: Iterable[Any]) -> list[Any]:
    """Return all combinations of some parameters' values; those not `chosen` are thorough.

    Choose so that each value occurs, and each pair of values that the code tells apart.
    """
    cases = list(product(*values))
    assert set(chosen) <= set(cases), "a case that is none"
    return [
        pytest.param(*case, marks=() if case in chosen else pytest.mark.thorough) for case in cases
    ]
