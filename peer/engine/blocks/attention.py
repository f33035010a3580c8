"""The attention of one block, over the KV caches of all sessions in a batch.

Rows of several sessions share the linears; attention runs per segment, that is per session.

Tensor suffixes: N rows of all segments (batch times tokens), B rows and T tokens of one segment,
H hidden, J query and key heads together, G key-value heads, S tokens, D head size, O output
features.
"""

from collections.abc import Sequence

import torch

from ....kernels.attention.torch_attention import attention
from ....kernels.linear.linear import Linear
from ..scheduler import count_part_tokens
from .attention_kernels import AttentionKernels
from .attention_options import AttentionOptions, QueryKeyTurn
from .pass_attention import attend_within_rows
from .pass_rows import PassRows
from .rows import RowRange, Segment, Segments, apply_linear


class Attention:
    """Queries, keys and values of a block, attention over the cache, and the output linear."""

    def __init__(
        self,
        block: int,
        options: AttentionOptions,
        query_key_value: Linear,
        output: Linear,
        turn: QueryKeyTurn,
        kernels: AttentionKernels,
    ) -> None:
        self.options = options
        parts = (query_key_value, output, turn)
        self.num_bytes = sum(part.num_bytes for part in parts)
        self.num_parameters = sum(part.num_parameters for part in parts)
        self.linears = {"query_key_value": query_key_value, "output": output}
        self._block = block
        self._query_key_value = query_key_value
        self._output = output
        self._turn = turn
        self._kernels = kernels

    @property
    def is_cut_anywhere(self) -> bool:
        """Whether attention gives the same wherever a prompt is cut into parts."""
        return self._kernels.prompts is not None

    @property
    def has_fixed_shapes(self) -> bool:
        """Whether generated tokens are attended to in the same way however long texts are."""
        return self._kernels.tokens is not None

    @property
    def kernels(self) -> list[str]:
        """What computes generated tokens, and what prompts, for people."""
        return ["torch" if kernel is None else kernel.name for kernel in self._kernels]

    @property
    def first(self) -> Linear:
        """The linear that makes queries, keys and values."""
        return self._query_key_value

    def project(self, normed_NH: torch.Tensor, ranges: Sequence[RowRange]) -> torch.Tensor:
        """Return queries, keys and values side by side."""
        return apply_linear(self._query_key_value, normed_NH, ranges)

    def finish(self, attended_NO: torch.Tensor, ranges: Sequence[RowRange]) -> torch.Tensor:
        """Return what is added to the hidden states."""
        return apply_linear(self._output, attended_NO, ranges)

    def attend_without_cache(self, fused_NO: torch.Tensor, rows: PassRows) -> torch.Tensor:
        """Attend among the tokens of a pass; autograd may differentiate it."""
        return attend_within_rows(fused_NO, self.options, self._turn, rows)

    def attend(self, fused_NO: torch.Tensor, segments: Segments) -> torch.Tensor:
        """Attend with all rows, and write new keys and values into the segments' caches.

        Generated tokens and prompts each go together, where kernels can.
        """
        options, (attend_tokens, attend_prompts) = self.options, self._kernels
        if attend_tokens is None:
            attended = [self._attend(fused_NO, segment) for segment in segments.all]
            return attended[0] if len(attended) == 1 else torch.cat(attended)
        attended_NO = fused_NO.new_empty(len(fused_NO), options.num_heads * options.head_dim)
        attend_tokens(fused_NO, segments, attended_NO)
        if attend_prompts is not None:
            attend_prompts(fused_NO, segments, attended_NO)
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
        query_key_BJTD = self._turn(query_key_BTJD, segment.rotations)
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
