"""Root mean square normalization over the last dimension."""

import torch.nn.functional as F
from torch import Tensor


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return `hidden / sqrt(mean(hidden**2) + eps) * weight`, normalized over the last dimension.

    Statistics are float32 whatever the input (Zhang and Sennrich, 2019, arXiv:1910.07467). The
    result has the dtype of `hidden` and is rounded once, after the weight; LlamaRMSNorm rounds
    16-bit values before it too. Fits block norms and the q/k norm of single heads alike.
    """
    # The fused operation wants one dtype and warns otherwise.
    return F.rms_norm(hidden, weight.shape, weight.to(hidden.dtype), eps)
