"""A batch cut into microbatches, and what came of them put together.

Tensor suffixes: B rows, T tokens, H hidden, L blocks of a span, P tokens of a deep prompt.
"""

from __future__ import annotations

import itertools
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ...protocol.ids import PassId, SessionId
from ...protocol.limits import MAX_BATCH_ROWS, MAX_PASS_PROMPTS
from ...protocol.messages.passes import (
    Pass,
    PassKind,
    Slot,
    list_answer_slots,
    list_question_slots,
)
from ...protocol.spans import Span
from ...protocol.tensors import WireDtype, compute_num_bytes
from ..adapters.adapter_versions import (
    AdapterGradients,
    AdapterVersion,
    RowAdapters,
    add_gradients,
    count_gradients,
    list_adapter_rows,
    split_gradients,
)
from ..routing.route import Hop

MOST_TOKENS = 1024
"""Rows times tokens of one microbatch, unless one row has more."""

_FEW_TOKENS = 256
"""Below that a microbatch is not worth its frames, and linears are slower for each token."""

_MICROBATCHES_PER_HOP = 4
"""So many keep all hops busy most of the time: while the first and the last are on their way, some
wait. With 2 hops and 8 microbatches that is an eighth of the time."""


@dataclass(frozen=True)
class Texts:
    """Rows of equal length on their way into some blocks, and the deep prompts of each of these.

    Deep prompts are [L, B, P, H], or, where all rows of the batch share them, [L, 1, P, H]. That
    does not follow from the shape: a microbatch may have one row.
    """

    hidden_BTH: Tensor
    prompts_LBPH: Tensor | None = None
    shares_prompts: bool = False
    adapters: RowAdapters = ()
    trains_adapters: bool = False
    """Whether gradients of the adapters will be asked for."""

    @property
    def num_rows(self) -> int:
        """Rows, B."""
        return self.hidden_BTH.shape[0]

    @property
    def num_tokens(self) -> int:
        """Rows times tokens."""
        return self.hidden_BTH.shape[0] * self.hidden_BTH.shape[1]

    @property
    def most_rows(self) -> int:
        """How many rows a message may have, which is bounded for deep prompts as well."""
        if self.prompts_LBPH is None or self.shares_prompts:
            return MAX_BATCH_ROWS
        num_blocks, _, num_tokens, _ = self.prompts_LBPH.shape
        return max(1, min(MAX_BATCH_ROWS, MAX_PASS_PROMPTS // (num_blocks * num_tokens)))

    def take_rows(self, rows: slice) -> Texts:
        """Return some of the rows."""
        prompts = self.prompts_LBPH
        if prompts is not None and not self.shares_prompts:
            prompts = prompts[:, rows]
        return replace(
            self,
            hidden_BTH=self.hidden_BTH[rows],
            prompts_LBPH=prompts,
            adapters=self.adapters[rows],
        )

    def take_blocks(self, blocks: slice) -> Texts:
        """Return the texts with the deep prompts of some of the blocks, counted from the first."""
        prompts = self.prompts_LBPH
        return replace(self, prompts_LBPH=None if prompts is None else prompts[blocks])

    def make_pass(self, hop: Hop, wire_dtype: str, *, is_backward: bool) -> Pass:
        """Return what a peer is asked for; see `ClientConfig.wire_dtype` for that of tensors."""
        if wire_dtype == "auto":
            wire_dtype = "fp32" if hop.peer.weights == "fp32" else "bf16"
        num_rows, num_tokens, hidden_size = self.hidden_BTH.shape
        prompts = self.prompts_LBPH
        prompt_rows, prompt_tokens = (0, 0) if prompts is None else prompts.shape[1:3]
        adapters = list_adapter_rows(self.adapters, hop.span)
        return Pass(
            make_pass_id(),
            PassKind.BACKWARD if is_backward else PassKind.FORWARD,
            hop.peer.model_id,
            hop.span,
            num_rows,
            num_tokens,
            WireDtype[wire_dtype.upper()],
            prompt_rows,
            prompt_tokens,
            adapters,
            count_gradients(self.adapters, hop.span, hidden_size) if is_backward else 0,
            trains_adapters=self.trains_adapters and bool(adapters) and not is_backward,
        )

    def count_bytes(self, asked: Pass) -> int:
        """Return how many bytes the tensors of a pass and of its answer have."""
        slots = (*list_question_slots(asked).values(), *list_answer_slots(asked).values())
        return compute_num_bytes(asked.dtype, 1, sum(slots), self.hidden_BTH.shape[-1])

    def list_tensors(self, grads_BTH: Tensor | None) -> dict[Slot, Tensor]:
        """Return the tensors of a question about them as vectors, [N, H]."""
        width = self.hidden_BTH.shape[-1]
        tensors = {Slot.HIDDEN: self.hidden_BTH.reshape(-1, width)}
        if grads_BTH is not None:
            tensors[Slot.GRADIENTS] = grads_BTH.reshape(-1, width)
        if self.prompts_LBPH is not None:
            tensors[Slot.PROMPTS] = self.prompts_LBPH.reshape(-1, width)
        return tensors

    def move_to(self, hidden_BTH: Tensor) -> Texts:
        """Return the same texts with other hidden states: those between other blocks."""
        return replace(self, hidden_BTH=hidden_BTH)


@dataclass(frozen=True)
class HopInput:
    """Texts as they went into one hop, for the way back.

    That goes through the same weights: those of a peer with another format are another function.
    """

    span: Span
    texts: Texts
    weights: str


@dataclass(frozen=True)
class MicrobatchInputs:
    """The inputs of each hop for one microbatch, which is some rows of a batch."""

    rows: slice
    inputs: Sequence[HopInput]


@dataclass(frozen=True)
class TextGradients:
    """Hidden states behind some blocks, or gradients of all inputs, in the shapes of `Texts`."""

    hidden_BTH: Tensor
    prompts_LBPH: Tensor | None = None
    adapters: AdapterGradients = field(default_factory=dict[AdapterVersion, Any])

    @classmethod
    def read(cls, tensors: Mapping[Slot, Tensor], texts: Texts, span: Span) -> TextGradients:
        """Return what a peer answered, in the shapes of the texts that went into a span."""
        prompts = tensors.get(Slot.PROMPTS)
        if prompts is not None and texts.prompts_LBPH is not None:
            prompts = prompts.view(texts.prompts_LBPH.shape)
        hidden_BTH = tensors[Slot.HIDDEN].view(texts.hidden_BTH.shape)
        vectors = tensors.get(Slot.ADAPTERS, hidden_BTH[:0])
        return cls(hidden_BTH, prompts, split_gradients(texts.adapters, span, vectors))

    def multiply(self, factor: float) -> TextGradients:
        """Return all of them times a number."""
        prompts = self.prompts_LBPH
        adapters = {
            adapter: {name: factor * gradient for name, gradient in gradients.items()}
            for adapter, gradients in self.adapters.items()
        }
        return TextGradients(
            factor * self.hidden_BTH, None if prompts is None else factor * prompts, adapters
        )


def make_pass_id() -> PassId:
    """Return a name for a question that nobody has asked before."""
    return PassId(SessionId(secrets.token_bytes(16)))


def choose_scale(grads_BTH: Tensor) -> float:
    """Return the power of two that makes the largest gradient about one.

    Those of a mean over many tokens are so small that 16-bit floats of 5 exponent bits lose them.
    Multiplying gradients multiplies those before them as well.
    """
    largest = float(grads_BTH.abs().max())
    if largest == 0 or not math.isfinite(largest):
        return 1.0
    return 2.0 ** -math.frexp(largest)[1]


def halve(rows: slice) -> tuple[slice, slice]:
    """Return both halves of some rows."""
    middle = (rows.start + rows.stop) // 2
    return slice(rows.start, middle), slice(middle, rows.stop)


def cut_rows(
    num_rows: int,
    num_tokens: int,
    num_hops: int,
    most_tokens: int,
    most_rows: int = MAX_BATCH_ROWS,
) -> list[slice]:
    """Return the rows of each microbatch of rows of `num_tokens` each, as even as can be.

    Rows are not cut: each attends to all of itself.

    >>> len(cut_rows(8, 256, 2, 1024))
    8
    >>> cut_rows(5, 110, 2, 1024)
    [slice(0, 3, None), slice(3, 5, None)]
    >>> cut_rows(2, 5000, 1, 1024)
    [slice(0, 1, None), slice(1, 2, None)]
    """
    needed = -(-num_rows * num_tokens // most_tokens)
    worthwhile = num_rows * num_tokens // _FEW_TOKENS
    wanted = min(num_hops * _MICROBATCHES_PER_HOP, worthwhile)
    needed = max(needed, -(-num_rows // most_rows))
    num_parts = min(num_rows, max(1, needed, wanted))
    size, rest = divmod(num_rows, num_parts)
    starts = [0]
    for index in range(num_parts):
        starts.append(starts[-1] + size + (index < rest))
    return [slice(*pair) for pair in itertools.pairwise(starts)]


def join_gradients(parts: Sequence[TextGradients], shares_prompts: bool) -> TextGradients:
    """Return the gradients of a batch from those of its microbatches."""
    hidden_BTH = torch.cat([part.hidden_BTH for part in parts])
    adapters = add_gradients([part.adapters for part in parts])
    prompts = [part.prompts_LBPH for part in parts if part.prompts_LBPH is not None]
    if not prompts:
        return TextGradients(hidden_BTH, None, adapters)
    joined = torch.stack(prompts).sum(0) if shares_prompts else torch.cat(prompts, dim=1)
    return TextGradients(hidden_BTH, joined, adapters)
