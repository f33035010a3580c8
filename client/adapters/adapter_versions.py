"""Adapters as they are sent to peers: each state of one is an adapter of its own, by its digest."""

from __future__ import annotations

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import safetensors.torch
import torch
from torch import Tensor

from ...protocol.errors import UsageError
from ...protocol.ids import NO_ADAPTER, AdapterId, UploadId, make_adapter_id
from ...protocol.limits import MAX_ADAPTER_BYTES
from ...protocol.messages.adapters import AdapterHead, Leaf, LoraConfig, Manifest, find_block
from ...protocol.messages.passes import AdapterRows
from ...protocol.spans import Span


@dataclass(frozen=True)
class SpanAdapter:
    """The part of an adapter for some blocks, as files, and the shapes of its matrices.

    Of an adapter that somebody else has published only the name is known.
    """

    name: AdapterId
    config: bytes = b""
    tensors: bytes = b""
    shapes: Mapping[str, torch.Size] = field(default_factory=dict[str, torch.Size])

    @property
    def num_numbers(self) -> int:
        """How many numbers its gradients have."""
        return sum(shape.numel() for shape in self.shapes.values())


@dataclass(eq=False)
class AdapterVersion:
    """The matrices of one adapter at one time, which never change.

    `lineage` is the same for all versions of an adapter, whose `number` grows. It is a part of
    what is sent: gradients of two adapters that hold the same numbers must not become one.
    """

    config: LoraConfig
    matrices: Mapping[str, Tensor]
    is_trained: bool
    lineage: str
    number: int
    _parts: dict[Span, SpanAdapter | None] = field(
        default_factory=dict[Span, SpanAdapter | None], init=False
    )

    def cut(self, span: Span) -> SpanAdapter | None:
        """Return what belongs to some blocks; None if nothing does.

        Raises UsageError where that is more than a peer takes.
        """
        if span not in self._parts:
            # Another thread may do the same at the same time: what is there stays.
            return self._parts.setdefault(span, self._cut(span))
        return self._parts[span]

    def is_cut(self, span: Span) -> bool:
        """Return whether `cut` has nothing to do any more."""
        return span in self._parts

    def _cut(self, span: Span) -> SpanAdapter | None:
        matrices = {
            name: self.matrices[name] for name in sorted(self.matrices) if is_in(name, span)
        }
        if not matrices:
            return None
        config, tensors = self.config.to_json(self.lineage), safetensors.torch.save(matrices)
        check_size(len(tensors), span)
        shapes = {name: matrix.shape for name, matrix in matrices.items()}
        return SpanAdapter(make_adapter_id(config, tensors), config, tensors, shapes)

    def publish(self, span: Span) -> AdapterLeaves | None:
        """Return what it has for some blocks as it is published; None if it has nothing there.

        Equal weights get equal names. Raises UsageError where that is more than a peer takes.
        """
        blocks: dict[int, dict[str, Tensor]] = defaultdict(dict)
        for name in sorted(self.matrices):
            if is_in(name, span) and (block := find_block(name)) is not None:
                blocks[block][name] = self.matrices[name]
        if not blocks:
            return None
        files = {block: safetensors.torch.save(blocks[block]) for block in sorted(blocks)}
        check_size(sum(map(len, files.values())), span)
        leaves = tuple(
            Leaf(block, hashlib.sha256(file).digest(), len(file)) for block, file in files.items()
        )
        return AdapterLeaves(Manifest(self.config.to_json(), leaves), files)


@dataclass(frozen=True)
class AdapterLeaves:
    """An adapter as it is published: its manifest, and the file of each block."""

    manifest: Manifest
    files: Mapping[int, bytes]

    def cut(self, upload_id: UploadId, span: Span) -> tuple[AdapterHead, bytes]:
        """Return what a peer that serves some blocks is sent."""
        data = b"".join(self.files[leaf.block] for leaf in self.manifest.select(span))
        return self.manifest.make_head(upload_id, len(data)), data


@dataclass(frozen=True)
class PublishedAdapter:
    """An adapter that peers have already, by its name: mostly one that somebody has published."""

    name: AdapterId
    is_trained: bool = False

    def cut(self, span: Span) -> SpanAdapter:
        """Return its name: peers have the rest."""
        return SpanAdapter(self.name)


@dataclass(frozen=True)
class ShardedVersion:
    """An adapter that peers train, as it is at one time; their client knows what it is called.

    `lineage` is the same for all versions of an adapter, whose `number` grows.
    """

    lineage: str
    number: int
    is_trained: bool

    def cut(self, span: Span) -> SpanAdapter | None:
        """Return nothing: nobody is brought it by this."""
        return None


SentAdapter = AdapterVersion | PublishedAdapter | ShardedVersion
RowAdapters = tuple[SentAdapter | None, ...]
"""One for each row, or none at all."""

AdapterGradients = Mapping[AdapterVersion, Mapping[str, Tensor]]


def find_sharded(rows: RowAdapters) -> ShardedVersion | None:
    """Return the adapter of some rows that peers train; it is the only one of its call."""
    return next((one for one in rows if isinstance(one, ShardedVersion)), None)


def list_adapters(rows: RowAdapters) -> Sequence[SentAdapter]:
    """Return each adapter of some rows once, in the order of their first rows."""
    return [adapter for adapter in dict.fromkeys(rows) if adapter is not None]


async def cut_adapters(adapters: Iterable[SentAdapter], span: Span) -> None:
    """Cut adapters for some blocks on another thread: copying and hashing them takes a while.

    Raises what `AdapterVersion.cut` does, which is done at once afterwards.
    """
    for adapter in adapters:
        if isinstance(adapter, AdapterVersion) and not adapter.is_cut(span):
            await asyncio.to_thread(adapter.cut, span)


def list_adapter_rows(rows: RowAdapters, span: Span) -> tuple[AdapterRows, ...]:
    """Return which rows have what, as a pass says it; nothing where no adapter has these blocks."""
    names = [NO_ADAPTER if part is None else part.name for part in _cut_all(rows, span)]
    if not any(names):
        return ()
    return tuple(AdapterRows(name, len(list(group))) for name, group in groupby(names))


def count_gradients(rows: RowAdapters, span: Span, width: int) -> int:
    """Return how many vectors the gradients of all adapters fill; 0 where nobody wants them."""
    adapters = list_adapters(rows)
    if not any(adapter.is_trained for adapter in adapters):
        return 0
    parts = _cut_all(adapters, span)
    return -(-sum(part.num_numbers for part in parts if part is not None) // width)


def split_gradients(rows: RowAdapters, span: Span, vectors_NH: Tensor) -> AdapterGradients:
    """Return the gradients of each matrix from what a peer has answered for some blocks."""
    if not len(vectors_NH):
        return {}
    numbers, start = vectors_NH.reshape(-1), 0
    gradients: dict[AdapterVersion, dict[str, Tensor]] = {}
    for adapter in list_adapters(rows):
        part = adapter.cut(span)
        if part is None or not isinstance(adapter, AdapterVersion):
            continue
        found = gradients[adapter] = {}
        for name, shape in part.shapes.items():
            stop = start + shape.numel()
            found[name] = numbers[start:stop].view(shape)
            start = stop
    return gradients


def add_gradients(parts: Sequence[AdapterGradients]) -> AdapterGradients:
    """Return the sum of what several microbatches or hops have given."""
    total: dict[AdapterVersion, dict[str, Tensor]] = {}
    for part in parts:
        for adapter, gradients in part.items():
            known = total.setdefault(adapter, {})
            for name, gradient in gradients.items():
                known[name] = known[name] + gradient if name in known else gradient
    return total


def _cut_all(adapters: Iterable[SentAdapter | None], span: Span) -> list[SpanAdapter | None]:
    return [None if adapter is None else adapter.cut(span) for adapter in adapters]


def check_size(num_bytes: int, span: Span) -> None:
    """Raise UsageError when matrices of some blocks are more than a peer takes."""
    if num_bytes > MAX_ADAPTER_BYTES:
        raise UsageError(
            f"the adapter has {num_bytes / 2**20:.1f} MiB in blocks {span}, and a peer takes "
            f"{MAX_ADAPTER_BYTES / 2**20:.1f} MiB: use a lower rank or fewer target_modules"
        )


def is_in(name: str, span: Span) -> bool:
    """Return whether a matrix of this name belongs to one of some blocks."""
    block = find_block(name)
    return block is not None and block in span
