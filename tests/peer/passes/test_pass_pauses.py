"""How much work lies between two looks of a pass for tokens that wait: counted, not timed.

A cost is a multiplication times the bytes of what is multiplied, as in `kernels.pauses`; touching a
byte costs as much as 16 of them. 2**29 is about 3 milliseconds of one core.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from chosen_cases import choose_cases
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from shoal.kernels.linear.quantize import WeightFormat
from shoal.kernels.pauses import Pauses
from shoal.kernels.wire_tensors import encode_tensor
from shoal.models.checkpoints.checkpoint import Checkpoint
from shoal.peer.engine.loading.engine_loader import load_engine
from shoal.peer.passes.wire_passes import WireWork, run_pass
from shoal.protocol.ids import ModelId, PassId, SessionId
from shoal.protocol.messages.passes import Pass, PassKind, Slot, cut_vectors
from shoal.protocol.spans import Span
from shoal.protocol.tensors import WireDtype, WireTensor

PIECE_COST = 2**29
BYTE_COST = 16
TOKENS, WIDTH = 256, 1024
"""Four rows of them are the largest microbatch of several rows that a client makes."""

PRODUCTS = {"aten::mm": (0, 1), "aten::addmm": (1, 2), "aten::bmm": (0, 1)}
"""Matrix products, with the places of what they multiply."""

FREE = {"aten::empty", "aten::empty_like", "aten::new_empty", "aten::detach", "aten::_unsafe_view"}


class Costs(TorchDispatchMode):
    """Adds up what torch does, also in autograd, and what it is told, until the next look."""

    def __init__(self) -> None:
        super().__init__()
        self.between_looks: list[int] = []
        self._cost = 0

    def look(self) -> None:
        self.between_looks.append(self._cost)
        self._cost = 0

    def count_native(self, cost: int) -> None:
        self._cost += cost

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name in PRODUCTS:
            left, right = (args[place] for place in PRODUCTS[name])
            self._cost += left.numel() * right.shape[-1] * left.itemsize
        elif not func.is_view and name not in FREE:
            tensors = [*args, *(output if isinstance(output, list | tuple) else [output])]
            num_bytes = sum(one.nbytes for one in tensors if isinstance(one, Tensor))
            self._cost += BYTE_COST * num_bytes
        return output


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A block as wide as those of the model that is measured; what it computes means nothing."""
    path = tmp_path_factory.mktemp("wide")
    config = LlamaConfig(
        hidden_size=WIDTH, intermediate_size=5632, num_hidden_layers=1, num_attention_heads=16,
        num_key_value_heads=4, vocab_size=16, max_position_embeddings=2048,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(path)
    return path


def cut(hidden: Tensor) -> list[WireTensor]:
    vectors = hidden.view(-1, WIDTH)
    parts = cut_vectors(len(vectors), WireDtype.FP32, WIDTH)
    return [
        WireTensor(
            WireDtype.FP32, 1, len(part), WIDTH,
            encode_tensor(vectors[part.start : part.stop]),
        )
        for part in parts
    ]  # fmt: skip


# Without instructions for it, a processor takes seconds for four rows in bfloat16.
IN_INT8, IN_BF16, IN_FP32 = (
    (WeightFormat.INT8, 4, 2), (WeightFormat.BF16, 1, 2), (WeightFormat.FP32, 4, 3)
)  # fmt: skip


@pytest.mark.parametrize(
    ("setting", "kind"),
    choose_cases(
        [(IN_INT8, PassKind.BACKWARD), (IN_BF16, PassKind.FORWARD), (IN_FP32, PassKind.BACKWARD)],
        [IN_INT8, IN_BF16, IN_FP32],
        PassKind,
    ),
)
def test_two_or_three_pieces_of_work_at_most_lie_between_two_looks(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    setting: tuple[WeightFormat, int, int],
    kind: PassKind,
) -> None:
    weights, num_rows, num_pieces = setting
    engine = load_engine(Checkpoint.open(directory), Span(0, 1), weights, kv_budget_bytes=2**20)
    pass_id = PassId(SessionId(b"\1" * 16))
    asked = Pass(pass_id, kind, ModelId("a" * 32), Span(0, 1), num_rows, TOKENS, WireDtype.FP32)
    texts = torch.randn(num_rows, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    tensors = {Slot.HIDDEN: cut(texts)}
    if kind is PassKind.BACKWARD:
        tensors[Slot.GRADIENTS] = cut(texts)
    costs = Costs()
    if weights is WeightFormat.INT8:
        count_linears(monkeypatch, costs)

    with costs:
        costs.look()
        run_pass(engine.passes, WireWork(asked, tensors, engine.spec.hidden_size), costs.look)
        costs.look()

    assert len(costs.between_looks) > 12 * num_rows
    assert max(costs.between_looks) <= num_pieces * PIECE_COST


def count_linears(monkeypatch: pytest.MonkeyPatch, costs: Costs) -> None:
    """Count what the native kernels are given at a time, which torch does not see."""
    cut_work = Pauses.cut

    def cut_and_count(
        pauses: Pauses, length: int, cost_each: int, multiple: int = 1
    ) -> Iterator[slice]:
        for part in cut_work(pauses, length, cost_each, multiple):
            costs.count_native(len(range(length)[part]) * cost_each)
            yield part

    monkeypatch.setattr(Pauses, "cut", cut_and_count)
