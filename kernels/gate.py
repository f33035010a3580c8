"""The middle of a gated MLP: `silu(gate) * up`, from gate and up side by side.

In C for float32, one pass instead of two; the same bits on every instruction set and in any batch.
C is chosen where attention of prompts is, which asks for the same instructions.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from .native_library import load_library
from .prompt_attention import choose_prompt_instruction_set


@cache
def list_gate_instruction_sets() -> dict[str, int]:
    """Return those of this processor by name, fastest first; none without the library."""
    library = load_library()
    if library is None:
        return {}
    numbers = {"avx512": 2, "avx2": 1, "portable": 0}
    return {name: number for name, number in numbers.items() if library.shoal_gate_has(number)}


def gate_silu(gate_up: Tensor, instruction_set: int | None = None) -> Tensor:
    """Return `silu(gate) * up`; the last dimension holds the gates, then as many ups."""
    if instruction_set is None:
        instruction_set = choose_prompt_instruction_set()
    library = load_library()
    is_for_native = (
        gate_up.dtype is torch.float32
        and gate_up.device.type == "cpu"
        and not (torch.is_grad_enabled() and gate_up.requires_grad)
    )
    if library is None or instruction_set is None or not is_for_native:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up
    gate_up = gate_up.contiguous()
    num_columns = gate_up.shape[-1] // 2
    result = gate_up.new_empty(*gate_up.shape[:-1], num_columns)
    library.shoal_gate_silu(
        gate_up.data_ptr(),
        result.data_ptr(),
        result.numel() // num_columns if num_columns else 0,
        num_columns,
        instruction_set,
        torch.get_num_threads(),
    )
    return result
