"""The attention of one block, over the KV caches of all sessions in a batch.

Rows of several sessions share the linears; attention runs per segment, that is per session.

Tensor suffixes: N rows of all segments (batch times tokens), B rows and T tokens of one segment,
H hidden, J query and key heads together, G key-value heads, S tokens, D head size, O output
features.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...kernels.alibi import Alibi
from ...kernels.attention import attention
from ...kernels.linear import Linear
from ...kernels.norm import rms_norm
from ...kernels.prompt_attention import PromptAttention, can_attend_prompts
from ...kernels.rotary import apply_rotary
from ...kernels.token_attention import TokenAttention, TokenShape, can_attend
from .rows import RowRange, Segment, Segments, apply_linear
from .scheduler import count_part_tokens
from .spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """Everything that the attention of one block may do differently from that of another.

    `rope` says which of a segment's rotations turns queries and keys, None that none does.
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
    def of(cls, spec: ModelSpec, block: int, dtype: torch.dtype) -> "AttentionOptions":
        """Return the options of one block of a model; `dtype` is that of its activations."""
        scale = spec.attention_scale
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
            if spec.alibi is None
            else Alibi.build(spec.num_heads, scale=spec.alibi.scale, dtype=spec.alibi.dtype),
        )


class Attention:
    """Queries, keys and values of a block, attention over the cache, and the output linear.

    `query_key_norm_JD` holds the query norm once per query head, then the key norm once per key
    head, or is None for families without.
    """

    def __init__(
        self,
        block: int,
        options: AttentionOptions,
        query_key_value: Linear,
        output: Linear,
        query_key_norm_JD: torch.Tensor | None,
    ) -> None:
        self.options = options
        self.num_bytes = query_key_value.num_bytes + output.num_bytes
        self.num_parameters = query_key_value.num_parameters + output.num_parameters
        if query_key_norm_JD is not None:
            self.num_bytes += query_key_norm_JD.nbytes
            self.num_parameters += query_key_norm_JD.numel()
            self._ones_D = torch.ones(options.head_dim)
        self._block = block
        self._query_key_value = query_key_value
        self._output = output
        self._query_key_norm_JD = query_key_norm_JD
        shape = _find_plain_shape(options)
        self._token_attention = (
            TokenAttention(block, shape, query_key_norm_JD)
            if shape is not None and can_attend(shape)
            else None
        )
        self._prompt_attention = (
            PromptAttention(block, shape, query_key_norm_JD)
            if shape is not None and can_attend_prompts(shape)
            else None
        )

    @property
    def is_cut_anywhere(self) -> bool:
        """Whether attention gives the same wherever a prompt is cut into parts."""
        return self._prompt_attention is not None

    @property
    def kernels(self) -> list[str]:
        """What computes generated tokens, and what prompts, for people."""
        in_c = (self._token_attention, self._prompt_attention)
        return ["torch" if kernel is None else kernel.name for kernel in in_c]

    def __call__(
        self, normed_NH: torch.Tensor, segments: Segments, ranges: Sequence[RowRange]
    ) -> torch.Tensor:
        """Return what attention adds; writes new keys and values into the segments' caches."""
        fused_NO = apply_linear(self._query_key_value, normed_NH, ranges)
        return apply_linear(self._output, self._attend_all(fused_NO, segments), ranges)

    def _attend_all(self, fused_NO: torch.Tensor, segments: Segments) -> torch.Tensor:
        """Attention of all rows: generated tokens and prompts each together, where C can do it."""
        options = self.options
        attend_tokens, attend_prompts = self._token_attention, self._prompt_attention
        if attend_tokens is None or options.rope is None:
            attended = [self._attend(fused_NO, segment) for segment in segments.all]
            return attended[0] if len(attended) == 1 else torch.cat(attended)
        attended_NO = fused_NO.new_empty(len(fused_NO), options.num_heads * options.head_dim)
        if segments.decoded:
            attend_tokens(fused_NO, segments.token_batches[options.rope], attended_NO)
        if segments.prompts and attend_prompts is not None:
            attend_prompts(fused_NO, segments.prompt_batches[options.rope], attended_NO)
            return attended_NO
        for segment in segments.prompts:
            attended_NO[segment.start : segment.stop] = self._attend(fused_NO, segment)
        return attended_NO

    def _attend(self, fused_NO: torch.Tensor, segment: Segment) -> torch.Tensor:
        """Attention of one segment's rows [B*T, J*D + G*D] -> [B*T, queries]."""
        options = self.options
        num_rows, num_tokens = segment.num_rows, segment.num_tokens
        position = segment.position
        fused_BTXD = fused_NO[segment.start : segment.stop].view(
            num_rows, num_tokens, -1, options.head_dim
        )
        # Queries and keys lie side by side, so one pass norms and rotates both.
        query_key_BTJD, values_BTGD = fused_BTXD.tensor_split([-options.num_kv_heads], dim=2)
        query_key_BJTD = self._turn(query_key_BTJD, segment)
        queries_BHTD, keys_BGTD = query_key_BJTD.tensor_split([options.num_heads], dim=1)

        #   cache    0 .......... position ...... stop ....... capacity
        #            [ the prefix ][ this step    )[ not touched
        cache, stop = segment.cache, position + num_tokens
        cache.write(self._block, position, keys_BGTD, values_BTGD.transpose(1, 2))
        attended_BTHD = fused_NO.new_empty(
            num_rows, num_tokens, options.num_heads, options.head_dim
        )
        group_size = options.num_heads // options.num_kv_heads
        for (rows, groups), keys_BGSD, values_BGSD in cache.read(self._block, stop):
            heads = slice(groups.start * group_size, groups.stop * group_size)
            attended = self._attend_heads(
                queries_BHTD[rows, heads], keys_BGSD, values_BGSD, heads, segment
            )
            attended_BTHD[rows, :, heads] = attended.transpose(1, 2)
            del keys_BGSD, values_BGSD  # before the next ones are made
        return attended_BTHD.view(num_rows * num_tokens, -1)

    def _attend_heads(
        self,
        queries_BHTD: torch.Tensor,
        keys_BGSD: torch.Tensor,
        values_BGSD: torch.Tensor,
        heads: slice,
        segment: Segment,
    ) -> torch.Tensor:
        """Attention of some heads of a segment, [B, H, T, D]."""
        options, position = self.options, segment.position
        # How many queries attend together decides how torch rounds their sums. So it follows from
        # the step alone: parts of a prompt of one size however it was scheduled, and generated
        # tokens one by one, also in a replay, which then rebuilds the lost cache to the bit.
        stride = 1 if segment.is_decoded else count_part_tokens(segment.num_rows)
        attended = [
            attention(
                queries_BHTD[:, :, first:last],
                keys_BGSD[:, :, : position + last],
                values_BGSD[:, :, : position + last],
                position + first,
                scale=options.scale,
                sliding_window=options.sliding_window,
                softcap=options.softcap,
                alibi=None if options.alibi is None else options.alibi.select(heads),
            )
            for first in range(0, segment.num_tokens, stride)
            for last in (min(first + stride, segment.num_tokens),)
        ]
        return attended[0] if len(attended) == 1 else torch.cat(attended, dim=2)

    def _turn(self, query_key_BTJD: torch.Tensor, segment: Segment) -> torch.Tensor:
        """Norm and rotate queries and keys, as far as the model does; return them as BJTD."""
        if self._query_key_norm_JD is not None:
            # In float32 up to the end: 16 bits are rounded to once, after the weight.
            normed_BTJD = rms_norm(query_key_BTJD.float(), self._ones_D, self.options.norm_eps)
            normed_BTJD = normed_BTJD * self._query_key_norm_JD
            query_key_BTJD = normed_BTJD.to(query_key_BTJD.dtype)
        query_key_BJTD = query_key_BTJD.transpose(1, 2)
        if self.options.rope is None:
            return query_key_BJTD
        return apply_rotary(query_key_BJTD, *segment.rotations[self.options.rope])


def _find_plain_shape(options: AttentionOptions) -> TokenShape | None:
    """Return what the kernels in C have to know, None where a block does what they cannot."""
    is_plain = (
        options.dtype is torch.float32
        and options.rope is not None
        and options.scale == options.head_dim**-0.5
        and options.softcap is None
        and options.alibi is None
    )
    shape = TokenShape(
        options.num_heads,
        options.num_kv_heads,
        options.head_dim,
        options.sliding_window,
        options.norm_eps,
    )
    return shape if is_plain else None
