"""Hidden states to wire tensors and back."""

from torch import Tensor

from ...kernels.wire_tensors import decode_as, encode_as
from ...protocol.tensors import WireDtype, WireTensor


def to_wire(hidden_BTH: Tensor, dtype: WireDtype) -> WireTensor:
    """Return hidden states as they travel, converted to the wire's dtype."""
    rows, tokens, width = hidden_BTH.shape
    data = encode_as(dtype.name, hidden_BTH)
    return WireTensor(dtype, rows, tokens, width, data)


def from_wire(tensor: WireTensor) -> Tensor:
    """Return the hidden states of a wire tensor, in its dtype; in float32 where that is int8."""
    return decode_as(tensor.dtype.name, tensor.data, tensor.shape)
