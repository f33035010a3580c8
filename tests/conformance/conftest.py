"""What each seam's tests run against."""

import pytest
from transport_seam import Seam


@pytest.fixture(
    params=[
        "loopback",
        pytest.param("tcp", marks=pytest.mark.network),
        pytest.param("libp2p", marks=pytest.mark.network),
    ]
)
def seam(request: pytest.FixtureRequest) -> Seam:
    return Seam(request.param)
