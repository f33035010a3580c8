"""Settings of a peer that cannot be."""

from __future__ import annotations

import pytest

from shoal.peer.process.config import WEIGHT_FORMATS, PeerConfig
from shoal.protocol.errors import UsageError


@pytest.mark.parametrize(
    ("weights", "words"),
    [("nf4", "use int8"), ("NF4", "one of int8, bf16, fp32, nf4"), ("", "one of int8")],
)
def test_weights_that_cannot_be_are_refused_with_advice(weights: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        PeerConfig(model="m", weights=weights)


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "auto"])
def test_nf4_is_for_devices(device: str) -> None:
    assert PeerConfig(model="m", weights="nf4", device=device).weights == "nf4"


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"pass_bytes": 2**27 - 1}, r"least 128 MiB of memory, or none \(--training-memory"),
        ({"adapter_bytes": 2**24 - 1}, r"least 16 MiB of memory, or none \(--adapter-memory 0\)"),
    ],
)
def test_memory_in_which_nothing_would_find_room_is_refused_with_advice(
    setting: dict[str, int], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        PeerConfig("m", **setting)  # pyright: ignore[reportArgumentType]


def test_formats_of_weights_are_those_of_the_engine() -> None:
    from shoal.kernels.linear.quantize import WeightFormat

    assert set(WEIGHT_FORMATS) == {weights.value for weights in WeightFormat}
