"""Where an engine computes. All that differs between the CPU and other devices is chosen here.

Tensor suffixes: N rows of a step, H hidden.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from ....protocol.spans import Span
from ....protocol.tensors import KVFormat
from ..cache.kv_memory import LAYOUTS, KVStore, Layout
from ..cache.lazy_memory import LazyStore
from ..cache.paged_memory import PagedStore, make_paged_layouts
from .attention_kernels import AttentionKernels, PagedAttention, choose_native, choose_paged
from .attention_options import AttentionOptions, QueryKeyTurn
from .capturer import Capturer


class Device(ABC):
    """A processor with memory of its own: `place` is what torch calls it."""

    def __init__(self, place: torch.device, capturer: Capturer | None) -> None:
        self.place = place
        self.capturer = capturer
        """What captures steps of generated tokens; None where that brings nothing."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.place}>"

    @abstractmethod
    def make_layouts(
        self, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> Mapping[KVFormat, Layout]:
        """Return how caches lie in the memory of this device, for each of their formats."""

    @abstractmethod
    def open_store(
        self, budget_bytes: int, span: Span, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> KVStore:
        """Return memory for the caches of sessions that use blocks of a span."""

    @abstractmethod
    def choose_attention(
        self, block: int, options: AttentionOptions, turn: QueryKeyTurn
    ) -> AttentionKernels:
        """Return what attends in a block, over the caches of such a store."""

    @abstractmethod
    def bring(self, hidden: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return hidden states of several steps, [N, H] each on the CPU, on this device."""

    @abstractmethod
    def fetch(self, hidden: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return them on the CPU; waits until they are computed."""

    def read_free_bytes(self) -> int | None:
        """Return the memory that is left for weights and caches; None if it is the machine's."""
        return None

    def running(self) -> AbstractContextManager[object]:
        """Return what a thread has to be in while it computes here."""
        return nullcontext()


class CpuDevice(Device):
    """The processor of the machine, with kernels in C where a compiler was."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), None)

    def make_layouts(
        self, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> Mapping[KVFormat, Layout]:
        return {name: layout(num_kv_heads, head_dim, dtype) for name, layout in LAYOUTS.items()}

    def open_store(
        self, budget_bytes: int, span: Span, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> KVStore:
        return LazyStore(len(span), num_kv_heads, head_dim, dtype)

    def choose_attention(
        self, block: int, options: AttentionOptions, turn: QueryKeyTurn
    ) -> AttentionKernels:
        return choose_native(block, options, turn)

    def bring(self, hidden: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return hidden

    def fetch(self, hidden: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return hidden


CPU = CpuDevice()


class PagedDevice(Device):
    """A device whose caches lie in pages, which `attend` reads through tables.

    Tests make one of the CPU, so that all but the device itself is tested without one.
    """

    def __init__(
        self, place: torch.device, attend: PagedAttention, capturer: Capturer | None
    ) -> None:
        super().__init__(place, capturer)
        self._attend = attend

    def make_layouts(
        self, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> Mapping[KVFormat, Layout]:
        return make_paged_layouts(num_kv_heads, head_dim, dtype)

    def open_store(
        self, budget_bytes: int, span: Span, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> KVStore:
        return PagedStore(budget_bytes, span, num_kv_heads, head_dim, dtype, self.place)

    def choose_attention(
        self, block: int, options: AttentionOptions, turn: QueryKeyTurn
    ) -> AttentionKernels:
        return choose_paged(block, options, turn, self._attend)

    def bring(self, hidden: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if not hidden:
            return hidden
        return torch.cat(list(hidden)).to(self.place).split([len(part) for part in hidden])

    def fetch(self, hidden: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if not hidden:
            return hidden
        return torch.cat(list(hidden)).cpu().split([len(part) for part in hidden])
