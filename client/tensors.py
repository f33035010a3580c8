"""Hidden states to wire tensors and back."""

import torch
from torch import Tensor

from ..kernels.compress import decode_tensor, encode_tensor
from ..protocol.tensors import WireCodec, WireDtype, WireTensor

TORCH_DTYPES = {
    WireDtype.FP32: torch.float32,
    WireDtype.FP16: torch.float16,
    WireDtype.BF16: torch.bfloat16,
}


def to_wire(hidden_BTH: Tensor, dtype: WireDtype) -> WireTensor:
    """Return hidden states as they travel, converted to the wire's dtype."""
    rows, tokens, width = hidden_BTH.shape
    data = encode_tensor(hidden_BTH.to(TORCH_DTYPES[dtype]))
    return WireTensor(dtype, WireCodec.RAW, rows, tokens, width, data)


def from_wire(tensor: WireTensor) -> Tensor:
    """Return the hidden states of a wire tensor, in the wire's dtype."""
    return decode_tensor(tensor.data, TORCH_DTYPES[tensor.dtype], tensor.shape)
