"""How two ends agree on a protocol version."""

import pytest

from shoal.protocol.errors import ErrorCode, RefusedError
from shoal.protocol.versions import MAX_VERSION, MIN_VERSION, agree_on_version


@pytest.mark.parametrize(
    ("their_min", "their_max", "version"),
    [
        (MIN_VERSION, MAX_VERSION, MAX_VERSION),
        (0, MAX_VERSION + 5, MAX_VERSION),
        (MAX_VERSION, 2**32 - 1, MAX_VERSION),
        (0, MIN_VERSION, MIN_VERSION),
    ],
)
def test_highest_common_version_is_spoken(their_min: int, their_max: int, version: int) -> None:
    assert agree_on_version(their_min, their_max) == version


@pytest.mark.parametrize(
    ("their_min", "their_max"),
    [
        (0, MIN_VERSION - 1),
        (MAX_VERSION + 1, MAX_VERSION + 9),
        (MAX_VERSION + 1, MIN_VERSION - 1),
        (MAX_VERSION + 1, MAX_VERSION),  # an empty range of versions holds none
        (0, 0),
    ],
)
def test_no_common_version_is_refused_with_both_ranges(their_min: int, their_max: int) -> None:
    with pytest.raises(RefusedError) as refusal:
        agree_on_version(their_min, their_max)

    assert refusal.value.code is ErrorCode.BAD_VERSION
    assert refusal.value.retry_after_seconds is None
    assert f"{MIN_VERSION} to {MAX_VERSION}" in str(refusal.value)
    assert f"{their_min} to {their_max}" in str(refusal.value)
