"""One decoder block, driven by its spec: the only place where a peer multiplies.

Rows of several sessions share the linears; attention runs per segment, that is per session.

Tensor suffixes: N rows of all segments (batch times tokens), B rows and T tokens of one segment,
H hidden, J query and key heads together, G key-value heads, D head size, O output features.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from ...kernels.attention import attention
from ...kernels.linear import Linear, RowPath
from ...kernels.norm import rms_norm
from ...kernels.rotary import apply_rotary
from ...kernels.token_attention import (
    TokenAttention,
    TokenBatch,
    TokenSegment,
    TokenShape,
    can_attend,
)
from .kv_cache import SessionCache
from .scheduler import count_part_tokens
from .spec import ACTIVATIONS, ModelSpec


@dataclass(frozen=True, slots=True)
class Segment:
    """The rows `[start, stop)` of N that belong to one session's step.

    `stop - start == num_rows * num_tokens`; the tokens of a row are consecutive. Tokens with
    `is_decoded` attend one by one, as they were or would be computed. `cos_TD` and `sin_TD` are
    the rotary tables of their positions.
    """

    start: int
    stop: int
    num_rows: int
    num_tokens: int
    position: int
    is_decoded: bool
    cache: SessionCache
    cos_TD: torch.Tensor
    sin_TD: torch.Tensor


@dataclass(frozen=True)
class Segments:
    """The segments of a batch, in order of their rows."""

    all: Sequence[Segment]

    @cached_property
    def prompts(self) -> list[Segment]:
        """Those whose tokens attend together."""
        return [segment for segment in self.all if not segment.is_decoded]

    @cached_property
    def token_batch(self) -> TokenBatch:
        """The others, laid out for the kernel that takes them at once."""
        return TokenBatch(
            [
                TokenSegment(
                    segment.cache.states_LCBGSD,
                    segment.cache.span.start,
                    segment.start,
                    segment.position,
                    segment.cos_TD,
                    segment.sin_TD,
                )
                for segment in self.all
                if segment.is_decoded
            ]
        )


@dataclass(frozen=True, slots=True)
class PathRange:
    """The rows `[start, stop)` of N whose linears take one path."""

    start: int
    stop: int
    path: RowPath


@dataclass(frozen=True, slots=True)
class BlockWeights:
    """The weights of one block, quantized and fused: what the loader hands over.

    `query_key_norm_JD` holds the query norm once per query head, then the key norm once per key
    head, or is None for families without.
    """

    attention_norm_H: torch.Tensor
    mlp_norm_H: torch.Tensor
    query_key_value: Linear
    output: Linear
    gate_up: Linear
    down: Linear
    query_key_norm_JD: torch.Tensor | None

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The four linears, in the order of use."""
        return self.query_key_value, self.output, self.gate_up, self.down

    @property
    def norms(self) -> tuple[torch.Tensor, ...]:
        """The vectors that are not quantized."""
        norms = (self.attention_norm_H, self.mlp_norm_H, self.query_key_norm_JD)
        return tuple(norm for norm in norms if norm is not None)

    @property
    def num_bytes(self) -> int:
        """Memory of everything here."""
        return sum(linear.num_bytes for linear in self.linears) + sum(
            norm.nbytes for norm in self.norms
        )

    @property
    def num_parameters(self) -> int:
        """Numbers of everything here."""
        return sum(linear.num_parameters for linear in self.linears) + sum(
            norm.numel() for norm in self.norms
        )


class Block:
    """One decoder block with pre-norms, rotary attention over a KV cache, and a gated MLP."""

    def __init__(self, spec: ModelSpec, index: int, weights: BlockWeights) -> None:
        self.index = index
        self.weights = weights
        self._norm_eps = spec.norm_eps
        self._activation = ACTIVATIONS[spec.activation]
        self._num_heads = spec.num_heads
        self._num_query_key_heads = spec.num_heads + spec.num_kv_heads
        self._num_kv_heads = spec.num_kv_heads
        self._head_dim = spec.head_dim
        self._query_key_size = spec.query_size + spec.kv_size
        self._intermediate_size = spec.intermediate_size
        self._scale = spec.head_dim**-0.5
        self._sliding_window = spec.sliding_windows[index]
        self._ones_D = torch.ones(spec.head_dim, dtype=weights.attention_norm_H.dtype)
        self._token_attention = _make_token_attention(spec, index, weights)

    def __call__(
        self, hidden_NH: torch.Tensor, segments: Segments, ranges: Sequence[PathRange]
    ) -> torch.Tensor:
        """Return the block's output; writes the new keys and values into the segments' caches."""
        weights = self.weights

        normed_NH = rms_norm(hidden_NH, weights.attention_norm_H, self._norm_eps)
        fused_NO = _apply_linear(weights.query_key_value, normed_NH, ranges)
        attended_NO = self._attend_all(fused_NO, segments)
        hidden_NH = hidden_NH + _apply_linear(weights.output, attended_NO, ranges)

        normed_NH = rms_norm(hidden_NH, weights.mlp_norm_H, self._norm_eps)
        gate_up_NO = _apply_linear(weights.gate_up, normed_NH, ranges)
        gate_NO, up_NO = gate_up_NO.split(self._intermediate_size, dim=-1)
        gated_NO = self._activation(gate_NO).mul_(up_NO)
        return hidden_NH + _apply_linear(weights.down, gated_NO, ranges)

    def _attend_all(self, fused_NO: torch.Tensor, segments: Segments) -> torch.Tensor:
        """Attention of all rows: generated tokens together where there is a kernel for that."""
        if self._token_attention is None:
            return _join([self._attend(fused_NO, segment) for segment in segments.all])
        if len(segments.prompts) == len(segments.all) == 1:
            return self._attend(fused_NO, segments.prompts[0])
        attended_NO = fused_NO.new_empty(len(fused_NO), self._num_heads * self._head_dim)
        self._token_attention(fused_NO, segments.token_batch, attended_NO)
        for segment in segments.prompts:
            attended_NO[segment.start : segment.stop] = self._attend(fused_NO, segment)
        return attended_NO

    def _attend(self, fused_NO: torch.Tensor, segment: Segment) -> torch.Tensor:
        """Attention of one segment's rows [B*T, J*D + G*D] -> [B*T, queries]."""
        num_rows, num_tokens = segment.num_rows, segment.num_tokens
        position, stop = segment.position, segment.position + num_tokens
        fused_BTO = fused_NO[segment.start : segment.stop].view(num_rows, num_tokens, -1)

        # Queries and keys lie side by side, so one pass norms and rotates both.
        query_key_BTJD = fused_BTO[..., : self._query_key_size].unflatten(
            -1, (self._num_query_key_heads, self._head_dim)
        )
        if self.weights.query_key_norm_JD is not None:
            query_key_BTJD = rms_norm(query_key_BTJD, self._ones_D, self._norm_eps)
            query_key_BTJD = query_key_BTJD * self.weights.query_key_norm_JD
        query_key_BJTD = apply_rotary(
            query_key_BTJD.transpose(1, 2), segment.cos_TD, segment.sin_TD
        )
        values_BTGD = fused_BTO[..., self._query_key_size :].unflatten(
            -1, (self._num_kv_heads, self._head_dim)
        )

        #   cache    0 .......... position ...... stop ....... capacity
        #            [ the prefix ][ this step    )[ not touched
        keys_BGSD, values_BGSD = segment.cache.keys_values(self.index)
        keys_BGSD[:, :, position:stop] = query_key_BJTD[:, self._num_heads :]
        values_BGSD[:, :, position:stop] = values_BTGD.transpose(1, 2)
        # How many queries attend together decides how their sums are rounded. So it follows from
        # the step alone: parts of a prompt of one size however it was scheduled, and generated
        # tokens one by one, also in a replay, which then rebuilds the lost cache to the bit.
        stride = 1 if segment.is_decoded else count_part_tokens(num_rows)
        attended = [
            attention(
                query_key_BJTD[:, : self._num_heads, first:last],
                keys_BGSD[:, :, : position + last],
                values_BGSD[:, :, : position + last],
                position + first,
                scale=self._scale,
                sliding_window=self._sliding_window,
            )
            for first in range(0, num_tokens, stride)
            for last in (min(first + stride, num_tokens),)
        ]
        attended_BHTD = attended[0] if len(attended) == 1 else torch.cat(attended, dim=2)
        return attended_BHTD.transpose(1, 2).reshape(num_rows * num_tokens, -1)


def _apply_linear(
    linear: Linear, hidden_NI: torch.Tensor, ranges: Sequence[PathRange]
) -> torch.Tensor:
    if len(ranges) == 1:
        return linear(hidden_NI, ranges[0].path)
    return torch.cat([linear(hidden_NI[part.start : part.stop], part.path) for part in ranges])


def _join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _make_token_attention(
    spec: ModelSpec, index: int, weights: BlockWeights
) -> TokenAttention | None:
    """Return the kernel for generated tokens, None where it cannot compute this block."""
    shape = TokenShape(
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_dim,
        spec.sliding_windows[index],
        spec.norm_eps,
    )
    if weights.attention_norm_H.dtype is not torch.float32 or not can_attend(shape):
        return None
    return TokenAttention(index, shape, weights.query_key_norm_JD)
