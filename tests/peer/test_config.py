"""Settings of a peer that cannot be."""

from __future__ import annotations

import pytest

from shoal.peer.config import WEIGHT_FORMATS, PeerConfig
from shoal.protocol.errors import UsageError


@pytest.mark.parametrize(
    ("weights", "words"),
    [("nf4", "use int8"), ("NF4", "one of int8, bf16, fp32"), ("", "one of int8")],
)
def test_weights_that_cannot_be_are_refused_with_advice(weights: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        PeerConfig(model="m", weights=weights)


def test_formats_of_weights_are_those_of_the_engine() -> None:
    from shoal.kernels.quantize import WeightFormat

    assert set(WEIGHT_FORMATS) == {weights.value for weights in WeightFormat}
