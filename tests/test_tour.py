"""The product files that a decode step, a gradient and an announcement enter in a real swarm.

docs/tour.md names them in order.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType

import pytest
from entered_files import ANNOUNCEMENT, DECODE, GRADIENT, WALKS, Walk, trace_walks

pytestmark = [pytest.mark.network, pytest.mark.slow]

TOUR = Path(__file__).resolve().parents[1] / "docs" / "tour.md"
MOST_LINES = 150
MOST_FILES = MappingProxyType({DECODE: 49, GRADIENT: 60, ANNOUNCEMENT: 29})
"""0.6 of the files that the same trace found before the tree was divided into rooms. Announcements
have five more since nodes of the DHT are asked in frames of ours, not in messages of hivemind."""


def sections_of_tour() -> Iterator[tuple[str, str]]:
    """Yield the heading and the text of each section."""
    for section in TOUR.read_text(encoding="utf-8").split("\n## ")[1:]:
        heading, _, text = section.partition("\n")
        yield heading, text


def files_in_tour(walk: str) -> list[str]:
    """Return the paths that the section about a walk names, in order."""
    (text,) = (text for heading, text in sections_of_tour() if walk in heading)
    return re.findall(r"`((?:protocol|kernels|models|peer|client|cli)/[\w/]+\.py)`", text)


@pytest.fixture(scope="module")
def walks() -> dict[str, Walk]:
    return trace_walks()


@pytest.mark.parametrize("name", WALKS)
def test_trace_finds_the_same_files_in_every_half_of_a_walk(
    walks: dict[str, Walk], name: str
) -> None:
    steps = walks[name].steps

    assert set(Walk(steps[::2]).files) == set(Walk(steps[1::2]).files) == set(walks[name].files)


@pytest.mark.parametrize("name", WALKS)
def test_walk_enters_few_files(walks: dict[str, Walk], name: str) -> None:
    assert len(walks[name].files) <= MOST_FILES[name]


@pytest.mark.parametrize("name", WALKS)
def test_tour_names_each_file_of_a_walk_once(walks: dict[str, Walk], name: str) -> None:
    assert sorted(files_in_tour(name)) == sorted(walks[name].files)


@pytest.mark.parametrize("name", WALKS)
def test_tour_names_files_in_the_order_in_which_they_are_entered(
    walks: dict[str, Walk], name: str
) -> None:
    files = files_in_tour(name)
    backwards = [
        (second, first)
        for place, first in enumerate(files)
        for second in files[place + 1 :]
        if walks[name].is_before(second, first)
    ]

    assert not backwards


def test_tour_is_one_page() -> None:
    assert len(TOUR.read_text(encoding="utf-8").splitlines()) <= MOST_LINES
