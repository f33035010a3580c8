"""The product files that a decode step, a gradient and an announcement enter in a real swarm."""

import pytest
from entered_files import ANNOUNCEMENT, DECODE, GRADIENT, WALKS, Walk, trace_walks

pytestmark = [pytest.mark.network, pytest.mark.slow]


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
def test_trace_finds_files_of_client_peer_and_protocol(walks: dict[str, Walk], name: str) -> None:
    folders = {file.split("/")[0] for file in walks[name].files}

    assert folders >= {"client", "peer", "protocol"}


def test_trace_finds_the_kernels_where_something_is_computed(walks: dict[str, Walk]) -> None:
    computing = {name: [f for f in walks[name].files if f.startswith("kernels/")] for name in WALKS}

    assert computing[DECODE]
    assert set(computing[GRADIENT]) - set(computing[DECODE]), "gradients have kernels of their own"
    assert not computing[ANNOUNCEMENT]


@pytest.mark.parametrize("name", [DECODE, GRADIENT])
def test_trace_leads_from_the_client_to_the_peers_and_back(
    walks: dict[str, Walk], name: str
) -> None:
    walk = walks[name]
    first_of_peer = next(file for file in walk.files if file.startswith("peer/"))

    assert walk.files[0].startswith("client/")
    assert walk.files[-1].startswith("client/")
    assert walk.is_before(walk.files[0], first_of_peer)
    assert walk.is_before(first_of_peer, walk.files[-1])


def test_trace_leads_from_the_announcing_peer_to_the_client(walks: dict[str, Walk]) -> None:
    files = walks[ANNOUNCEMENT].files

    assert files[0].startswith("peer/")
    assert files[-1].startswith("client/")
