"""The middle of a gated MLP: `silu(gate) * up`, from gate and up side by side.

In C for float32, one pass instead of two, and one instead of four for the gradient; the same bits
on every instruction set and in any batch. C is chosen where attention of prompts is, which asks
for the same instructions.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..attention.native_attention import choose_prompt_instruction_set
from ..native.library import load_library
from .activations import Activation, multiply_gate


def gate(activation: Activation, gate_up: Tensor) -> Tensor:
    """Return `activation(gate) * up`; the last dimension holds the gates, then as many ups."""
    if activation is F.silu:
        return gate_silu(gate_up)
    return multiply_gate(activation, gate_up)


def gate_silu(gate_up: Tensor, instruction_set: int | None = None) -> Tensor:
    """Return `silu(gate) * up`.

    To be differentiated once: in C its gradient has none.
    """
    if instruction_set is None:
        instruction_set = choose_prompt_instruction_set()
    is_for_native = gate_up.dtype is torch.float32 and gate_up.device.type == "cpu"
    if load_library() is None or instruction_set is None or not is_for_native:
        return multiply_gate(F.silu, gate_up)
    if torch.is_grad_enabled() and gate_up.requires_grad:
        return _GateFunction.apply(gate_up, instruction_set)  # type: ignore[no-any-return]
    return _compute(gate_up, None, instruction_set)


class _GateFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, instruction_set: int) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.instruction_set = instruction_set
        return _compute(gate_up, None, instruction_set)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        (gate_up,) = ctx.saved_tensors
        return _compute(gate_up, grads[0], ctx.instruction_set), None


def _compute(gate_up: Tensor, grads: Tensor | None, instruction_set: int) -> Tensor:
    """Return `silu(gate) * up`, or the gradients of both, given those of that product."""
    library = load_library()
    assert library is not None
    gate_up = gate_up.contiguous()
    grads = None if grads is None else grads.contiguous()
    num_columns = gate_up.shape[-1] // 2
    if grads is None:
        result = gate_up.new_empty(*gate_up.shape[:-1], num_columns)
    else:
        result = torch.empty_like(gate_up)
    library.shoal_gate_silu(
        gate_up.data_ptr(),
        None if grads is None else grads.data_ptr(),
        result.data_ptr(),
        gate_up.numel() // (2 * num_columns) if num_columns else 0,
        num_columns,
        instruction_set,
        torch.get_num_threads(),
    )
    return result
