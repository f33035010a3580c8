"""What the tests with real processes have in common."""

import contextlib
from collections.abc import Iterator

import pytest


@pytest.fixture
def peers() -> Iterator[contextlib.ExitStack]:
    """Ends every peer that a test starts with `start`."""
    with contextlib.ExitStack() as stack:
        yield stack
