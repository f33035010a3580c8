"""Attention in C over the caches of many sessions in one call: of generated tokens, and of prompts.

Takes a block's queries, keys and values as they come out of their linear: norms and rotates,
writes the new keys and values into the caches, and attends. Computes with states in float32 or
kept as int8; without the library, `torch_attention.py` does the same one session at a time.

A token's result depends on its own session's tokens up to itself, and is the same to the bit on
every instruction set, in any batch, in a replay, and however a prompt was cut into steps.
`TokenAttention` attends with one query at a time, `PromptAttention` with many; their results
differ in the last digits, since sums are taken in another order.

Tensor suffixes: N tokens of all sessions, T tokens of one row, J query and key heads, D head size,
R rotated part of it.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ..native.library import INSTRUCTION_SETS, list_instruction_sets, load_library

MAX_HEAD_DIM = 1024
MAX_HEADS_PER_GROUP = 1024


@cache
def choose_instruction_set() -> int | None:
    """Return the fastest instruction set, None without the library."""
    return next(iter(list_instruction_sets("attention").values()), None)


@dataclass(frozen=True, slots=True)
class TokenShape:
    """The shape of a block's attention; `window` is the most keys of a token, None for all."""

    num_heads: int
    num_groups: int
    head_dim: int
    window: int | None = None
    norm_eps: float = 0.0

    @property
    def is_small(self) -> bool:
        """Whether C has room for it."""
        return (
            self.head_dim <= MAX_HEAD_DIM
            and self.num_heads // self.num_groups <= MAX_HEADS_PER_GROUP
        )


def can_attend(shape: TokenShape) -> bool:
    """Return whether blocks of this shape can be computed here."""
    return shape.is_small and choose_instruction_set() is not None


@cache
def choose_prompt_instruction_set() -> int | None:
    """Return the fastest instruction set; None without the library, or where torch is faster."""
    library = load_library()
    number = -1 if library is None else library.shoal_prompt_attention_choose()
    return None if number < 0 else number


def can_attend_prompts(shape: TokenShape) -> bool:
    """Return whether blocks of this shape should be computed here."""
    return shape.is_small and choose_prompt_instruction_set() is not None


class _Shape(ctypes.Structure):
    """`Shape` of native/attention.h."""

    _fields_ = (
        ("num_heads", ctypes.c_int64),
        ("num_groups", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("norm_eps", ctypes.c_float),
        ("query_key_norm", ctypes.c_void_p),
    )


class _Segment(ctypes.Structure):
    """`Segment` of native/attention.h."""

    _fields_ = (
        ("cache", ctypes.c_void_p),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("rotary_dim", ctypes.c_int64),
        ("first_block", ctypes.c_int64),
        ("capacity", ctypes.c_int64),
        ("first_row", ctypes.c_int64),
        ("num_rows", ctypes.c_int64),
        ("num_tokens", ctypes.c_int64),
        ("position", ctypes.c_int64),
        ("is_int8", ctypes.c_int64),
    )


@dataclass(frozen=True, slots=True)
class TokenSegment:
    """The tokens of one session: rows `[first_row, first_row + num_rows * num_tokens)` of N.

    `states_LCBGSD` is the session's memory (C: keys, values), whose first block is `first_block`:
    float32, or int8 with the records of `int8_kv` for D;
    tokens are written from `position` on. `cos_TR` and `sin_TR` are the tables of their positions.
    """

    states_LCBGSD: Tensor
    first_block: int
    first_row: int
    position: int
    cos_TR: Tensor
    sin_TR: Tensor


class TokenBatch:
    """Segments that are computed together, laid out for C. Good for every block they go through."""

    def __init__(self, segments: Sequence[TokenSegment]) -> None:
        self._segments = tuple(segments)  # the memory that the addresses below point into
        self.array = (_Segment * len(segments))(*(_lay_out(segment) for segment in segments))

    def __len__(self) -> int:
        return len(self._segments)


class TokenAttention:
    """One block's attention of generated tokens. Raises ValueError for what it cannot compute."""

    kernel = "attention"
    choose = staticmethod(choose_instruction_set)

    def __init__(
        self,
        block: int,
        shape: TokenShape,
        query_key_norm_JD: Tensor | None = None,
        instruction_set: int | None = None,
    ) -> None:
        library = load_library()
        if instruction_set is None:
            instruction_set = self.choose()
        if library is None or instruction_set is None or not shape.is_small:
            raise ValueError(f"there is no kernel for {shape}")
        self._block = block
        self._result_size = shape.num_heads * shape.head_dim
        self._fused_size = (shape.num_heads + 2 * shape.num_groups) * shape.head_dim
        self._norm_JD = None if query_key_norm_JD is None else query_key_norm_JD.contiguous()
        self._shape = _Shape(
            shape.num_heads,
            shape.num_groups,
            shape.head_dim,
            shape.window or 0,
            shape.head_dim**-0.5,
            shape.norm_eps,
            None if self._norm_JD is None else self._norm_JD.data_ptr(),
        )
        self._shape_address = ctypes.addressof(self._shape)
        self._instruction_set = instruction_set
        self._attend = getattr(library, f"shoal_{self.kernel}_attend")

    @property
    def name(self) -> str:
        """The name of the kernel, for people to read."""
        return INSTRUCTION_SETS[self._instruction_set]

    def __call__(self, fused_NO: Tensor, batch: TokenBatch, attended_NO: Tensor) -> None:
        """Write the segments' rows of `attended_NO` [N, heads * D] from those of `fused_NO`, the
        queries, keys and values side by side; both float32 and contiguous.
        """
        _check(fused_NO, self._fused_size)
        _check(attended_NO, self._result_size)
        status = self._attend(
            self._shape_address,
            ctypes.addressof(batch.array),
            len(batch),
            self._block,
            fused_NO.data_ptr(),
            attended_NO.data_ptr(),
            self._instruction_set,
            torch.get_num_threads(),
        )
        if status:
            raise MemoryError(f"no memory to attend over {len(batch)} sessions")


class PromptAttention(TokenAttention):
    """One block's attention of prompts; called like that of tokens, with segments of prompts."""

    kernel = "prompt_attention"
    choose = staticmethod(choose_prompt_instruction_set)


def _check(tensor: Tensor, width: int) -> None:
    """Addresses are all that C gets to see."""
    if not tensor.is_contiguous() or tensor.dtype is not torch.float32 or tensor.shape[-1] != width:
        raise ValueError(
            f"{width} contiguous float32 numbers per row are needed, not {tuple(tensor.shape)}"
        )


def _lay_out(segment: TokenSegment) -> _Segment:
    states_LCBGSD = segment.states_LCBGSD
    is_int8 = states_LCBGSD.dtype is torch.int8
    for tensor in (segment.cos_TR, segment.sin_TR, *([] if is_int8 else [states_LCBGSD])):
        _check(tensor, tensor.shape[-1])
    num_rows, capacity = states_LCBGSD.shape[2], states_LCBGSD.shape[4]
    return _Segment(
        states_LCBGSD.data_ptr(),
        segment.cos_TR.data_ptr(),
        segment.sin_TR.data_ptr(),
        segment.cos_TR.shape[1],
        segment.first_block,
        capacity,
        segment.first_row,
        num_rows,
        segment.cos_TR.shape[0],
        segment.position,
        is_int8,
    )
