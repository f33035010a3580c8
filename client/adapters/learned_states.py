"""An adapter with what an optimizer remembers of it, as it is brought to peers and fetched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from ...protocol.errors import RemoteProtocolError
from ...protocol.ids import UploadId, make_adapter_id
from ...protocol.messages.adapters import AdapterHead, LoraConfig, OptimizerKind, find_block
from ...protocol.spans import Span
from .adapter_versions import check_size, is_in

_HEADER_BYTES = 2**20


@dataclass(frozen=True)
class LearnedState:
    """Matrices by PEFT's names, and the moments of each; none before the first update."""

    config: LoraConfig
    kind: OptimizerKind
    matrices: Mapping[str, Tensor]
    moments: tuple[Mapping[str, Tensor], ...] = ()
    num_updates: int = 0

    @property
    def span(self) -> Span:
        """From the first block that it has matrices for to the last."""
        blocks = [block for name in self.matrices if (block := find_block(name)) is not None]
        return Span(min(blocks), max(blocks) + 1)

    @property
    def most_bytes(self) -> int:
        """The largest size of its files, with moments."""
        num_bytes = sum(matrix.nbytes for matrix in self.matrices.values())
        return (num_bytes + _HEADER_BYTES) * (1 + self.kind.num_moments)

    def cut(self, span: Span) -> LearnedState:
        """Return what belongs to some blocks."""

        def choose(matrices: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name: matrix for name, matrix in matrices.items() if is_in(name, span)}

        moments = tuple(map(choose, self.moments))
        return replace(self, matrices=choose(self.matrices), moments=moments)

    def pack(self, upload_id: UploadId, mark: str) -> tuple[AdapterHead, bytes]:
        """Return how it is announced, and its files, one behind the other.

        Raises UsageError where they are more than a peer takes.
        """
        files = [_encode(file) for file in (self.matrices, *self.moments)]
        check_size(len(files[0]), self.span)
        config, data = self.config.to_json(mark), b"".join(files)
        head = AdapterHead(
            upload_id,
            make_adapter_id(config, data),
            config,
            len(data),
            optimizer=self.kind,
            num_updates=self.num_updates,
            num_trained=sum(matrix.numel() for matrix in self.matrices.values()),
        )
        return head, data

    def read(self, head: AdapterHead, data: bytes, num_updates: int) -> LearnedState:
        """Return what a peer has made of it by now, after so many updates.

        Raises RemoteProtocolError for anything else: a stranger has sent it.
        """
        if (head.optimizer, head.num_updates) != (self.kind, num_updates):
            raise RemoteProtocolError("a peer returned another adapter than requested")
        size = len(data) // head.num_files
        files = [_decode(data[start : start + size]) for start in range(0, len(data), size)]
        for file in files:
            if file.keys() != self.matrices.keys():
                raise RemoteProtocolError("a peer returned the matrices of another adapter")
            for name, matrix in file.items():
                like = self.matrices[name]
                is_alike = matrix.shape == like.shape and matrix.dtype == like.dtype
                if not is_alike or not bool(matrix.isfinite().all()):
                    raise RemoteProtocolError(f"a peer returned a damaged {name}")
        return replace(self, matrices=files[0], moments=tuple(files[1:]), num_updates=num_updates)


def _encode(matrices: Mapping[str, Tensor]) -> bytes:
    return safetensors.torch.save({name: matrices[name] for name in sorted(matrices)})


def _decode(data: bytes) -> Mapping[str, Tensor]:
    try:
        return safetensors.torch.load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise RemoteProtocolError(
            "a peer returned an adapter that is not in safetensors format"
        ) from error
