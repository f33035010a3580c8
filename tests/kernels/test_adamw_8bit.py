"""AdamW with moments in 8 bits: equal to bitsandbytes' own optimizer, where that is installed."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.kernels.adamw_8bit import AdamW8bit, make_state
from shoal.kernels.linear.nf4 import has_bitsandbytes

BETAS = (0.9, 0.95)
SIZES = [(64,), (64, 64), (5_003,), (1_025, 1_030)]
"""In 32 bits; of whole blocks; with a block in part; taken in two pieces."""


def refuse(*_: Any, **__: Any) -> None:
    raise NotImplementedError("Could not run 'bitsandbytes::optimizer_update_8bit_blockwise'")


def train(shape: tuple[int, ...], num_threads: int) -> dict[str, Tensor]:
    """Return a weight after three steps, and the state of its optimizer."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(shape, generator=generator)
    state, optimizer = make_state(weight), AdamW8bit()
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for number in range(3):
            gradient = torch.randn(shape, generator=generator) * 10.0**-number
            optimizer.step(
                weight, gradient, state, learning_rate=0.01, betas=BETAS, weight_decay=0.1
            )
    finally:
        torch.set_num_threads(before)
    return {"weight": weight, **state}


@pytest.mark.skipif(not has_bitsandbytes(), reason="needs bitsandbytes")
@pytest.mark.parametrize("shape", SIZES)
def test_steps_are_those_of_the_library(shape: tuple[int, ...]) -> None:
    library: Any = pytest.importorskip("bitsandbytes")
    generator = torch.Generator().manual_seed(3)
    weight = torch.nn.Parameter(torch.randn(shape, generator=generator))
    plain = library.optim.AdamW8bit([weight], lr=0.01, betas=BETAS, weight_decay=0.1)
    for number in range(3):
        weight.grad = torch.randn(shape, generator=generator) * 10.0**-number
        plain.step()

    ours = train(shape, num_threads=1)

    theirs = plain.state[weight]
    assert ours.pop("step") == theirs["step"] == 3
    assert torch.equal(ours.pop("weight"), weight)
    assert ours.keys() == {name for name in theirs if name[:5] in ("state", "absma")}
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.skipif(not has_bitsandbytes(), reason="needs bitsandbytes")
@pytest.mark.parametrize("shape", SIZES)
def test_threads_change_nothing(shape: tuple[int, ...]) -> None:
    one, three = train(shape, num_threads=1), train(shape, num_threads=3)

    assert all(torch.equal(one[name], three[name]) for name in one)


def test_state_takes_two_bytes_per_number() -> None:
    for device in ("cpu", "meta"):
        state = make_state(torch.zeros(1_000, 256, device=device))
        assert sum(one.nbytes for one in state.values()) == 2 * 256_000 + 2 * 4 * 1_000 + 4


def test_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)

    with pytest.raises(ValueError, match="8-bit AdamW needs bitsandbytes: pip"):
        AdamW8bit()


def test_library_without_the_rule_for_processors_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    older: Any = ModuleType("bitsandbytes")
    older.__spec__ = SimpleNamespace()
    older.functional = SimpleNamespace(
        create_dynamic_map=lambda signed: torch.zeros(256), optimizer_update_8bit_blockwise=refuse
    )
    monkeypatch.setitem(sys.modules, "bitsandbytes", older)

    with pytest.raises(ValueError, match=r"on a CPU needs bitsandbytes 0\.50 or later"):
        AdamW8bit()
