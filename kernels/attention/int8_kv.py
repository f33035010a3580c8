"""Keys and values as 8-bit integers: the records of an int8 KV cache, one per token and head.

A record is a float32 scale, then the numbers, then zeros up to a multiple of four bytes. The
kernels in C (native/states.h) write and read the same records to the bit.

Tensor suffixes: D head size, R bytes of a record.
"""

import itertools

import torch
from torch import Tensor

SCALE_BYTES = 4
LARGEST = 127.0

TINY = 1e-30
"""Below, all is zero: the inverse of a scale could not be told apart from infinity."""


def count_record_bytes(head_dim: int) -> int:
    """Return the bytes of one token's key or value in one head.

    >>> count_record_bytes(64), count_record_bytes(26)
    (68, 32)
    """
    return SCALE_BYTES + (head_dim + 3) // 4 * 4


def quantize_kv(states_D: Tensor) -> Tensor:
    """Return records [..., R] of keys or values [..., D] of any float dtype.

    One that is not finite has a scale that is NaN, so that it shows in whatever is made of it.
    """
    head_dim = states_D.shape[-1]
    records_R = states_D.new_zeros(
        (*states_D.shape[:-1], count_record_bytes(head_dim)), dtype=torch.int8
    )
    states_D = states_D.float()
    largest = states_D.abs().amax(dim=-1, keepdim=True)
    is_usual = (largest >= TINY) & largest.isfinite()
    # Zero, or NaN of what is not finite. A number that `where` takes would be copied to a device.
    odd_scales = largest - largest
    scales = torch.where(is_usual, largest / LARGEST, odd_scales)
    records_R[..., :SCALE_BYTES].view(torch.float32).copy_(scales)
    numbers_D = (states_D * (LARGEST / largest)).round()
    numbers_D = numbers_D.masked_fill_(~is_usual, 0.0)
    records_R[..., SCALE_BYTES : SCALE_BYTES + head_dim] = numbers_D.to(torch.int8)
    return records_R


def dequantize_kv(records_R: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Return the states [B, G, S, D] of records [B, G, S, R].

    Takes no memory beside the result but for one head, in float32.
    """
    scales = records_R[..., :SCALE_BYTES].view(torch.float32)
    numbers_D = records_R[..., SCALE_BYTES : SCALE_BYTES + head_dim]
    if dtype is torch.float32:
        return numbers_D.float().mul_(scales)
    states_D = torch.empty(numbers_D.shape, dtype=dtype, device=records_R.device)
    for head in itertools.product(*map(range, numbers_D.shape[:-2])):
        # Rounded once: the products are whole before they lose digits.
        states_D[head] = numbers_D[head].float().mul_(scales[head])
    return states_D
