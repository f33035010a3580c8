"""What is said about adapters: a client brings one, and rows of a batch name it."""

from dataclasses import dataclass

from .ids import NO_ADAPTER, AdapterId, UploadId


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The next `num_rows` rows of a batch have this adapter, or none."""

    adapter: AdapterId
    num_rows: int


@dataclass(frozen=True, slots=True)
class AdapterHead:
    """Ask a peer to keep a LoRA adapter; `num_bytes` of safetensors follow in pieces.

    `adapter` is the digest of both files, so what it names never changes. Whoever trains one brings
    each new state as an adapter of its own, and the one that it `replaces` is forgotten. Only the
    client that brought it may name it, unless `is_published`. The answer is `AdapterKept`.
    """

    upload_id: UploadId
    adapter: AdapterId
    config: bytes
    num_bytes: int
    is_published: bool = False
    replaces: AdapterId = NO_ADAPTER


@dataclass(frozen=True, slots=True)
class AdapterPiece:
    """Some bytes of the safetensors, from the one at `offset` on."""

    upload_id: UploadId
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class AdapterKept:
    """The adapter may be named, until nobody has used it for so long."""

    upload_id: UploadId
    keep_seconds: float
