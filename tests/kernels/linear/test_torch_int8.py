"""The int8 product in torch, with numbers that only other people's weights hold."""

from __future__ import annotations

import pytest
import torch

from shoal.kernels.linear import torch_int8


@pytest.mark.parametrize("is_exact", [True, False], ids=["integers", "floats"])
def test_lowest_number_of_8_bits_is_summed_exactly(
    is_exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_exact and not torch_int8.is_exact():
        pytest.skip("torch's integer product saturates on this processor")
    monkeypatch.setattr(torch_int8, "is_exact", lambda: is_exact)
    # The largest products there are, and an odd one at the end: float32 cannot hold their sum.
    numbers = torch.full((1, 1032), -128, dtype=torch.int8)
    numbers[0, -1] = 1

    sums = torch_int8._multiply_exactly(numbers, numbers.t())

    assert int(sums) == 1031 * 128 * 128 + 1
