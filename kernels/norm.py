"""Root mean square normalization over the last dimension."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .native_library import load_library


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return `hidden / sqrt(mean(hidden**2) + eps) * weight`, normalized over the last dimension.

    Statistics are float32 whatever the input (Zhang and Sennrich, 2019, arXiv:1910.07467). The
    result has the dtype of `hidden` and is rounded once, after the weight; LlamaRMSNorm rounds
    16-bit values before it too. Fits block norms and the q/k norm of single heads alike.
    """
    library = load_library()
    if library is None or not _is_for_native(hidden, weight):
        # The fused operation wants one dtype and warns otherwise.
        return F.rms_norm(hidden, weight.shape, weight.to(hidden.dtype), eps)
    # A fifth of torch's time for one row, a twentieth for many.
    hidden = hidden.contiguous()
    result = torch.empty_like(hidden)
    num_columns = weight.shape[0]
    library.shoal_norm_rms(
        hidden.data_ptr(),
        weight.data_ptr(),
        result.data_ptr(),
        hidden.numel() // num_columns,
        num_columns,
        eps,
    )
    return result


def _is_for_native(hidden: Tensor, weight: Tensor) -> bool:
    """Return whether C, which sees addresses only and knows no gradients, can do it."""
    return (
        hidden.dtype is weight.dtype is torch.float32
        and weight.is_contiguous()
        and hidden.shape[-1:] == weight.shape
        and hidden.device.type == weight.device.type == "cpu"
        and not (torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad))
    )
