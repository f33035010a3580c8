"""What each seam's tests run against."""

from collections.abc import Iterator

import pytest
from async_tests import RunAsync
from transport_seam import Seam


@pytest.fixture(
    params=[
        "loopback",
        pytest.param("tcp", marks=pytest.mark.network),
        pytest.param("libp2p", marks=pytest.mark.network),
    ]
)
def seam(request: pytest.FixtureRequest, run_async: RunAsync) -> Iterator[Seam]:
    seam = Seam(request.param)
    run_async(seam.begin())
    yield seam
    run_async(seam.end())
