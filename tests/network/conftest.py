"""What the tests with real processes have in common."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from async_tests import RunAsync

if TYPE_CHECKING:
    from directory_processes import Directories


@pytest.fixture
def peers() -> Iterator[contextlib.ExitStack]:
    """Ends every peer that a test starts with `start`."""
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def dht(run_async: RunAsync) -> Iterator[Directories]:
    """Joins a DHT in the process of the test, and leaves it."""
    from directory_processes import Directories

    directories = Directories()
    yield directories
    run_async(directories.close())
