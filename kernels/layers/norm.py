"""Normalization over the last dimension: root mean square norms and layer norms."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

import torch
import torch.nn.functional as F
from torch import Tensor

from ..native.library import load_library


class NormKind(Enum):
    """The kind of a norm: RMSNorm or LayerNorm."""

    RMS = "rms"
    """Divides by the root mean square; has a weight."""

    LAYER = "layer"
    """Subtracts the mean and divides by the deviation; has a weight and, mostly, a bias."""


@dataclass(frozen=True, slots=True)
class Norm:
    """One norm with its weights; each row's result depends on that row alone."""

    kind: NormKind
    weight_H: Tensor
    bias_H: Tensor | None
    eps: float

    @property
    def num_bytes(self) -> int:
        """Memory of weight and bias."""
        return self.weight_H.nbytes + (0 if self.bias_H is None else self.bias_H.nbytes)

    def to(self, device: torch.device) -> Norm:
        """Return the same norm on a device."""
        bias_H = None if self.bias_H is None else self.bias_H.to(device)
        return replace(self, weight_H=self.weight_H.to(device), bias_H=bias_H)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the normalized hidden states, in their dtype."""
        if self.kind is NormKind.RMS:
            return rms_norm(hidden, self.weight_H, self.eps)
        return layer_norm(hidden, self.weight_H, self.bias_H, self.eps)


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return `hidden / sqrt(mean(hidden**2) + eps) * weight`, normalized over the last dimension.

    Statistics are float32 whatever the input (Zhang and Sennrich, 2019, arXiv:1910.07467). The
    result has the dtype of `hidden` and is rounded once, after the weight; LlamaRMSNorm rounds
    16-bit values before it too. A float32 weight keeps all its digits, whatever the input. Fits
    block norms and the q/k norm of single heads alike.
    """
    if weight.dtype is torch.float32 and hidden.dtype is not torch.float32:
        return rms_norm(hidden.float(), weight, eps).to(hidden.dtype)
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


def layer_norm(hidden: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Return `(hidden - mean) / sqrt(variance + eps) * weight + bias` over the last dimension.

    Statistics are float32 whatever the input (Ba, Kiros and Hinton, 2016, arXiv:1607.06450). The
    result has the dtype of `hidden`.
    """
    bias = None if bias is None else bias.to(hidden.dtype)
    return F.layer_norm(hidden, weight.shape, weight.to(hidden.dtype), bias, eps)


def _is_for_native(hidden: Tensor, weight: Tensor) -> bool:
    """Return whether C, which sees addresses only and knows no gradients, can do it."""
    return (
        hidden.dtype is weight.dtype is torch.float32
        and weight.is_contiguous()
        and hidden.shape[-1:] == weight.shape
        and hidden.device.type == weight.device.type == "cpu"
        and not (torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad))
    )
