"""Options of a block's attention that are the same on any device.

Tensor suffixes: B rows and T tokens, J query and key heads together, D head size.
"""

from dataclasses import dataclass

import torch

from ....kernels.attention.alibi import Alibi
from ....kernels.attention.rotary import Rotation, apply_rotary
from ....kernels.layers.norm import rms_norm
from ....models.specs.model_spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """Everything in which the attention of one block may differ from that of another.

    `rope` is the index of the rotation for queries and keys; None if they are not rotated.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    scale: float
    dtype: torch.dtype
    rope: int | None
    sliding_window: int | None
    softcap: float | None
    alibi: Alibi | None

    @classmethod
    def of(
        cls, spec: ModelSpec, block: int, dtype: torch.dtype, torch_device: torch.device
    ) -> "AttentionOptions":
        """Return the options of one block of a model; its activations are of `dtype` and there."""
        scale, alibi = spec.attention_scale, spec.alibi
        return cls(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            norm_eps=spec.norm_eps,
            scale=spec.head_dim**-0.5 if scale is None else scale,
            dtype=dtype,
            rope=spec.find_rope(block),
            sliding_window=spec.sliding_windows[block],
            softcap=spec.attention_softcap,
            alibi=None
            if alibi is None
            else Alibi.build(spec.num_heads, scale=alibi.scale, dtype=alibi.dtype).to(torch_device),
        )


class QueryKeyTransform:
    """Norms and rotates queries and keys, as far as the block does.

    `norm_JD` holds the query norm once per query head, then the key norm once per key head, or is
    None for families without.
    """

    def __init__(self, options: AttentionOptions, norm_JD: torch.Tensor | None) -> None:
        self.norm_JD = norm_JD
        self.num_bytes = 0 if norm_JD is None else norm_JD.nbytes
        self._options = options
        self._ones_D = (
            None if norm_JD is None else norm_JD.new_ones(options.head_dim, dtype=torch.float32)
        )

    def __call__(
        self, query_key_BTJD: torch.Tensor, rotations: tuple[Rotation, ...]
    ) -> torch.Tensor:
        """Return them as BJTD; rotations are those of the T positions, for each of the ropes."""
        if self.norm_JD is not None and self._ones_D is not None:
            # In float32 up to the end: 16 bits are rounded to once, after the weight.
            normed_BTJD = rms_norm(query_key_BTJD.float(), self._ones_D, self._options.norm_eps)
            normed_BTJD = normed_BTJD * self.norm_JD
            query_key_BTJD = normed_BTJD.to(query_key_BTJD.dtype)
        query_key_BJTD = query_key_BTJD.transpose(1, 2)
        if self._options.rope is None:
            return query_key_BJTD
        return apply_rotary(query_key_BJTD, *rotations[self._options.rope])
