"""Hidden states to wire tensors and back."""

from torch import Tensor

from ..kernels.compress import DTYPES, decode_tensor, encode_tensor
from ..protocol.tensors import WireCodec, WireDtype, WireTensor


def to_wire(hidden_BTH: Tensor, dtype: WireDtype) -> WireTensor:
    """Return hidden states as they travel, converted to the wire's dtype."""
    rows, tokens, width = hidden_BTH.shape
    data = encode_tensor(hidden_BTH.to(DTYPES[dtype.name]))
    return WireTensor(dtype, WireCodec.RAW, rows, tokens, width, data)


def from_wire(tensor: WireTensor) -> Tensor:
    """Return the hidden states of a wire tensor, in the wire's dtype."""
    return decode_tensor(tensor.data, DTYPES[tensor.dtype.name], tensor.shape)
