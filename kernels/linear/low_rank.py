"""What an adapter adds to a linear's outputs, so that a row's result depends on that row alone.

On the CPU the last digit of torch's matrix products depends on how many rows they have, and on
where these lie in memory. In C each sum is taken in one order, with the same bits on every
instruction set; C is chosen where attention of prompts is, which asks for the same instructions.
Without it torch takes each sum by itself.

Tensor suffixes: N tokens, R rank, I input and O output features.
"""

from functools import cache

import torch
from torch import Tensor

from ..native.library import load_library

_NUMBERS_AT_ONCE = 2**18
"""As many as stay in a core's cache."""

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""As native/low_rank.h calls them."""


@cache
def _choose_instruction_set() -> int | None:
    library = load_library()
    number = -1 if library is None else library.shoal_prompt_attention_choose()
    return None if number < 0 else min(number, 1)  # sums have the eight lanes of AVX2


def add_low_rank(
    hidden_NI: Tensor,
    down_RI: Tensor,
    up_OR: Tensor,
    scale: float,
    target_NO: Tensor,
    order_O: Tensor | None = None,
    instruction_set: int | None = None,
) -> None:
    """Add `up_OR[order_O] @ (down_RI @ hidden) * scale` to each row of `target_NO`, in place.

    The matrices are contiguous and on the CPU, in any float dtype.
    """
    if instruction_set is None:
        instruction_set = _choose_instruction_set()
    library = load_library()
    is_for_native = hidden_NI.dtype is target_NO.dtype is torch.float32
    if library is None or instruction_set is None or not is_for_native:
        add_low_rank_in_torch(hidden_NI, down_RI, up_OR, scale, target_NO, order_O)
        return
    num_rows, num_inputs = hidden_NI.shape
    rank, num_outputs = len(down_RI), target_NO.shape[1]
    if (
        down_RI.shape != (rank, num_inputs)
        or up_OR.shape != (num_outputs, rank)
        or len(target_NO) != num_rows
        or target_NO.stride(1) != 1
        or not (down_RI.is_contiguous() and up_OR.is_contiguous())
        or (order_O is not None and len(order_O) != num_outputs)
    ):
        raise ValueError("the matrices do not fit each other, or do not lie as they have to")
    hidden_NI = hidden_NI.contiguous()
    between_NR = hidden_NI.new_empty(num_rows, rank)
    library.shoal_low_rank_add(
        hidden_NI.data_ptr(),
        down_RI.data_ptr(),
        up_OR.data_ptr(),
        None if order_O is None else order_O.data_ptr(),
        between_NR.data_ptr(),
        target_NO.data_ptr(),
        num_rows,
        num_inputs,
        rank,
        num_outputs,
        target_NO.stride(0),
        scale,
        _DTYPES[down_RI.dtype],
        _DTYPES[up_OR.dtype],
        instruction_set,
        torch.get_num_threads(),
    )


def add_low_rank_in_torch(
    hidden_NI: Tensor,
    down_RI: Tensor,
    up_OR: Tensor,
    scale: float,
    target_NO: Tensor,
    order_O: Tensor | None = None,
) -> None:
    """Do the same as `add_low_rank`, in another order of sums."""
    up_OR = up_OR if order_O is None else up_OR[order_O]
    hidden_NR = _multiply_apart(hidden_NI.float(), down_RI.float())
    target_NO += (_multiply_apart(hidden_NR, up_OR.float()) * scale).to(target_NO.dtype)


def _multiply_apart(rows_NI: Tensor, weight_OI: Tensor) -> Tensor:
    """Return the product with each sum taken by itself, in the same order for each row."""
    step = max(1, _NUMBERS_AT_ONCE // weight_OI.numel())
    products = [
        (rows_NI[start : start + step, None] * weight_OI).sum(-1)
        for start in range(0, len(rows_NI), step)
    ]
    return products[0] if len(products) == 1 else torch.cat(products)
