"""LoRA adapters as peers and clients exchange them: PEFT's configuration and names, the messages
that carry adapters, and the pieces in which their files travel.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from enum import IntEnum
from itertools import pairwise
from typing import Annotated, Any, cast

from .. import limits
from ..errors import RemoteProtocolError
from ..ids import ADAPTER_ID_BYTES, NO_ADAPTER, AdapterId, UploadId
from ..spans import Span
from .fields import (
    Body,
    Header,
    HeaderPass,
    Message,
    Record,
    Spread,
    check_adapter,
    check_count,
    check_number,
    check_seconds,
    check_session,
    count_to,
    index_below,
    message,
    number_in,
    sized,
)

MAX_RANK = 256
"""An adapter costs each token as much as its numbers: of higher ranks more than its block."""

PREFIX = "base_model.model."
"""Before the name that a linear has in transformers."""

DOWN, UP = ".lora_A.weight", ".lora_B.weight"
"""Behind it: from its inputs to the rank, and from there to its outputs."""

_PLAIN_FIELDS: Mapping[str, tuple[object, ...]] = {
    "bias": (None, "none"),
    "lora_bias": (None, False),
    "use_dora": (None, False),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "target_parameters": (None, [], ()),
    "layer_replication": (None,),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, []),
    # The others begin at base weights that they change.
    "init_lora_weights": (None, True, False, "gaussian"),
    "loftq_config": (None, {}),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "use_qalora": (None, False),
    "use_bdlora": (None, False),
}
"""Fields that change how an adapter is applied, with the values that change nothing."""

KEEP_SECONDS = 300.0
"""How long an adapter is kept that its client neither uses nor publishes again."""

STALL_SECONDS = 60.0
"""How long an adapter on its way may stand still."""

SLOWEST_BYTES_PER_SECOND = 16 * 2**10
"""How slow a line may be for as long as it takes. Filling a peer's memory slowly harms it no more
than filling it at once: each client has a share, and keeps it by a message now and then."""

PIECE_BYTES = 48 * 2**10
"""Size of every piece but the last one."""

_MOST_NUMBERS = 2**32
_LEAST_EPSILON = 1e-30

_BodyAdapter = Annotated[
    AdapterId, Body(1, "bytes"), sized(ADAPTER_ID_BYTES, "an adapter's digest")
]
_HeaderUpload = Annotated[UploadId, Header("session"), check_session]


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """LoRA alpha; with the rank, it gives the factor of the product of both matrices."""

    rank: int
    alpha: float
    uses_root: bool = False
    """Whether that is `alpha / rank ** 0.5` (`use_rslora`), and not `alpha / rank`."""

    @property
    def scale(self) -> float:
        """The factor of the product of both matrices.

        >>> LoraConfig(4, 8).scale, LoraConfig(4, 8, uses_root=True).scale
        (2.0, 4.0)
        """
        return self.alpha / (self.rank**0.5 if self.uses_root else self.rank)

    def to_json(self, mark: str = "") -> bytes:
        """Return the file with only those fields that change how the adapter is applied.

        A `mark` tells adapters apart that are otherwise equal.
        """
        fields = {
            "lora_alpha": self.alpha,
            "peft_type": "LORA",
            "r": self.rank,
            "use_rslora": self.uses_root,
        }
        if mark:
            fields["mark"] = mark
        return json.dumps(fields).encode()


def parse_lora_config(data: bytes) -> tuple[LoraConfig, dict[str, Any]]:
    """Return what a file says, and all of its fields.

    Raises ValueError with half a sentence about what is not supported.
    """
    try:
        fields: Any = json.loads(data)
    except (ValueError, RecursionError):
        raise ValueError("adapter_config.json is not JSON") from None
    if not isinstance(fields, dict):
        raise ValueError("adapter_config.json does not describe a LoRA adapter of PEFT")
    fields = cast("dict[str, Any]", fields)
    if fields.get("peft_type") != "LORA":
        raise ValueError("adapter_config.json does not describe a LoRA adapter of PEFT")
    for name, plain in _PLAIN_FIELDS.items():
        if fields.get(name) not in plain:
            raise ValueError(f"{name} = {fields[name]!r:.60} is not supported")
    rank, alpha = fields.get("r"), fields.get("lora_alpha")
    if type(rank) is not int or not 1 <= rank <= MAX_RANK:
        raise ValueError(f"its rank r must be a number from 1 to {MAX_RANK}, not {rank!r:.60}")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) <= 1e6:
        raise ValueError(f"lora_alpha must be a number, not {alpha!r:.60}")
    uses_root = fields.get("use_rslora") or False
    if not isinstance(uses_root, bool):
        raise ValueError(f"use_rslora must be true or false, not {uses_root!r:.60}")
    return LoraConfig(rank, alpha, uses_root), fields


def check_rank(rank: int, module: str, num_inputs: int, num_outputs: int) -> None:
    """Raise ValueError, with half a sentence, if a linear has no use for so high a rank."""
    most = min(MAX_RANK, num_inputs, num_outputs)
    if rank > most:
        raise ValueError(
            f"{module:.200} has {num_inputs} inputs and {num_outputs} outputs, so its rank is at "
            f"most {most}, not {rank}"
        )


def find_block(name: str) -> int | None:
    """Return the block that a module or matrix belongs to; None for what is not in any.

    >>> find_block("base_model.model.model.layers.12.mlp.up_proj.lora_A.weight")
    12
    """
    found = re.search(r"\.(\d+)\.", name)
    return int(found[1]) if found else None


class OptimizerKind(IntEnum):
    """Which optimizer a peer runs for an adapter, and so what it remembers of each matrix."""

    NONE = 0
    """It runs at the client."""

    ADAMW = 1
    SGD = 2

    @property
    def num_moments(self) -> int:
        """How many numbers it remembers for each number of the adapter."""
        return {OptimizerKind.NONE: 0, OptimizerKind.ADAMW: 2, OptimizerKind.SGD: 1}[self]


@dataclass(frozen=True, slots=True)
class OptimizerSettings(Record):
    """The numbers of one update, as torch's AdamW and SGD understand them.

    SGD uses the rate, the decay and the momentum; AdamW all but the momentum.
    """

    kind: Annotated[OptimizerKind, Body(3, "uint32")]
    learning_rate: Annotated[
        float, Body(4, "double"), number_in(0, limits.MAX_LEARNING_RATE, "learning rate")
    ]
    weight_decay: Annotated[
        float, Body(5, "double"), number_in(0, limits.MAX_LEARNING_RATE, "weight decay")
    ] = 0.0
    momentum: Annotated[float, Body(6, "double")] = 0.0
    beta1: Annotated[float, Body(7, "double")] = 0.0
    beta2: Annotated[float, Body(8, "double")] = 0.0
    epsilon: Annotated[float, Body(9, "double")] = 0.0

    def check(self) -> None:
        """Raise ValueError unless the optimizer has exactly these settings."""
        if self.kind is OptimizerKind.ADAMW:
            check_number(self.epsilon, _LEAST_EPSILON, 1, "epsilon")
            fractions, unused = (self.beta1, self.beta2), (self.momentum,)
        elif self.kind is OptimizerKind.SGD:
            fractions, unused = (self.momentum,), (self.beta1, self.beta2, self.epsilon)
        else:
            raise ValueError("an update has an optimizer")
        for fraction in fractions:
            if not 0 <= fraction < 1:
                raise ValueError(f"{fraction} of what was before is outside 0 to 1")
        if any(unused):
            raise ValueError(f"{self.kind.name} has no such settings")


@dataclass(frozen=True, slots=True)
class Leaf(Record):
    """The digest and size of what a published adapter has for one block: a safetensors file."""

    block: Annotated[int, Body(1, "uint32"), index_below(limits.MAX_BLOCKS)]
    digest: Annotated[bytes, Body(2, "bytes"), sized(ADAPTER_ID_BYTES, "the digest of a leaf")]
    num_bytes: Annotated[
        int, Body(3, "uint32"), count_to(limits.MAX_ADAPTER_BYTES, "size of a leaf")
    ]


@dataclass(frozen=True, slots=True)
class Manifest:
    """The parts of a published adapter. Its digest is the adapter's name."""

    config: bytes
    leaves: tuple[Leaf, ...]

    @property
    def name(self) -> AdapterId:
        """The digest of all of it."""
        config = self.config
        digest = hashlib.sha256(b"published" + len(config).to_bytes(8, "little") + config)
        for leaf in self.leaves:
            digest.update(struct.pack("<II", leaf.block, leaf.num_bytes) + leaf.digest)
        return AdapterId(digest.digest())

    @property
    def blocks(self) -> tuple[int, ...]:
        """The blocks that the adapter changes."""
        return tuple(leaf.block for leaf in self.leaves)

    @property
    def num_bytes(self) -> int:
        """How many bytes it has itself."""
        return len(self.config) + len(self.leaves) * (8 + ADAPTER_ID_BYTES)

    def make_head(self, upload_id: UploadId, num_bytes: int) -> AdapterHead:
        """Return what announces so many bytes of leaves."""
        return AdapterHead(
            upload_id, self.name, self.config, num_bytes, is_published=True, leaves=self.leaves
        )

    def select(self, span: Span) -> tuple[Leaf, ...]:
        """Return the leaves of some blocks."""
        return tuple(leaf for leaf in self.leaves if leaf.block in span)

    def count_bytes(self, span: Span) -> int:
        """Return the size of the leaves of some blocks."""
        return sum(leaf.num_bytes for leaf in self.select(span))

    def split(self, span: Span, data: bytes) -> dict[int, bytearray]:
        """Return the leaves of some blocks from all of them, one behind the other.

        Raises RemoteProtocolError for one that is not what its digest says.
        """
        files: dict[int, bytearray] = {}
        start = 0
        for leaf in self.select(span):
            file = bytearray(data[start : start + leaf.num_bytes])
            if hashlib.sha256(file).digest() != leaf.digest:
                raise RemoteProtocolError(
                    f"the adapter is not what its digest says for block {leaf.block}"
                )
            files[leaf.block] = file
            start += leaf.num_bytes
        return files


@message(23)
class AdapterHead(Message):
    """Ask a peer to keep a LoRA adapter; `num_bytes` of safetensors follow in pieces.

    `adapter` is the digest of both files, so what it names never changes. A client that trains one
    uploads each new state as an adapter of its own, and the one that it `replaces` is forgotten.
    Only the client that brought it may name it, unless `is_published`. The answer is `AdapterKept`;
    of one that the client has published before it comes at once, and pieces are not needed.

    With an `optimizer` the peer is to train it, see `AdapterUpdate`. If it has learned before, the
    optimizer's moments follow its matrices, each as safetensors of the same names and sizes, and
    `num_updates` says how many updates they come from. A peer answers `AdapterFetch` in this form.

    From protocol version 6 on, a published adapter has `leaves`: with `config` they are its
    manifest, whose digest is `adapter`. The pieces are the leaves of the blocks that the peer
    serves; or of those that were asked for, where the head answers `PublicationFetch`.

    `num_trained` are the numbers that gradients will be asked for, 0 if they will not: a peer
    without memory for them declines before the adapter is on its way.
    """

    upload_id: _HeaderUpload
    adapter: _BodyAdapter
    config: Annotated[bytes, Body(2, "bytes")]
    num_bytes: Annotated[int, Body(3, "uint32")]
    is_published: Annotated[bool, Body(4, "bool")] = False
    replaces: Annotated[AdapterId, Body(5, "bytes"), check_adapter] = NO_ADAPTER
    optimizer: Annotated[OptimizerKind, Body(6, "uint32")] = OptimizerKind.NONE
    num_updates: Annotated[int, Body(7, "uint32")] = 0
    num_trained: Annotated[
        int, Body(8, "uint32"), number_in(0, limits.MAX_ADAPTER_BYTES, "number of trained numbers")
    ] = 0
    leaves: Annotated[tuple[Leaf, ...], Body(9)] = ()

    def check(self) -> None:
        """Raise ValueError unless sizes and digest fit, and the optimizer what it has done."""
        bound = limits.MAX_ADAPTER_BYTES * self.num_files
        if self.manifest is None:
            check_count(self.num_bytes, bound, "size of an adapter")
        else:
            check_number(self.num_bytes, 0, bound, "size of leaves")
            if len(self.leaves) > limits.MAX_ADAPTER_LEAVES:
                raise ValueError(f"an adapter of {len(self.leaves)} leaves")
            blocks = self.manifest.blocks
            if any(one >= other for one, other in pairwise(blocks)):
                raise ValueError("leaves stand in the order of their blocks, one for each")
            if not self.is_published or self.manifest.name != self.adapter:
                raise ValueError("the manifest of an adapter is not what its digest says")
        check_count(len(self.config), limits.MAX_ADAPTER_CONFIG_BYTES, "size of a configuration")
        if self.optimizer is OptimizerKind.NONE and self.num_updates:
            raise ValueError("what was updated has an optimizer")
        if self.optimizer and self.is_published:
            raise ValueError("an adapter that is published does not learn any more")
        if self.num_bytes % self.num_files:
            raise ValueError(f"{self.num_bytes} bytes are not {self.num_files} files of one size")

    @property
    def manifest(self) -> Manifest | None:
        """The parts of the published adapter; None for one without leaves."""
        return Manifest(self.config, self.leaves) if self.leaves else None

    @property
    def num_files(self) -> int:
        """How many safetensors of one size there are."""
        return 1 + self.optimizer.num_moments if self.num_updates else 1


@message(24)
class AdapterPiece(Message):
    """Some bytes of the safetensors, from the one at `offset` on."""

    upload_id: _HeaderUpload
    offset: Annotated[int, Header("position"), index_below(limits.MAX_TRAINED_BYTES)]
    data: Annotated[bytes, Body(1, "bytes")]

    def check(self) -> None:
        """Raise ValueError unless it has bytes, and as many as a frame takes."""
        check_count(len(self.data), limits.MAX_CONTROL_BYTES, "size of a piece")


@message(25)
class AdapterKept(Message):
    """The adapter may be named, until its client has not used it for so long."""

    upload_id: _HeaderUpload
    keep_seconds: Annotated[float, Body(1, "float"), check_seconds]


@message(30)
class AdapterWithdrawal(Message):
    """Ask a peer to forget an adapter that this client has brought, for itself or for everybody.

    Sessions and passes that have it go on with it. The answer is `AdapterKept`, for 0 seconds, also
    where the adapter is not there.
    """

    pass_id: HeaderPass
    adapter: _BodyAdapter


@dataclass(frozen=True, slots=True)
class GradientSum(Record):
    """Gradients that a peer has accumulated for an adapter: exactly those of these `parts`.

    A `number` grows with each sum of an adapter; a larger one lets the sum before be forgotten.
    """

    adapter: _BodyAdapter
    number: Annotated[int, Body(2, "uint64"), count_to(_MOST_NUMBERS, "number of a sum")]
    parts: Annotated[tuple[int, ...], Body(3, "uint32")] = ()

    def check(self) -> None:
        """Raise ValueError unless the parts stand in order, each once."""
        if len(self.parts) > limits.MAX_GRADIENT_PARTS:
            raise ValueError(f"a sum of {len(self.parts)} parts")
        if any(one >= other for one, other in pairwise((0, *self.parts))):
            raise ValueError("the parts of a sum stand in order, each once")


@message(26)
class AdapterMeasure(Message):
    """Ask how large the accumulated gradients of an adapter are; nothing changes."""

    pass_id: HeaderPass
    gradients: Annotated[GradientSum, Body(1)]

    def check(self) -> None:
        """Raise ValueError for gradients that nobody has accumulated."""
        if not self.gradients.parts:
            raise ValueError("a sum of 0 parts")


@message(27)
class AdapterMeasured(Message):
    """The sum of the squares of all of these gradients."""

    pass_id: HeaderPass
    square_sum: Annotated[float, Body(1, "double")]

    def check(self) -> None:
        """Raise ValueError for what no squares add up to."""
        if not math.isfinite(self.square_sum) or self.square_sum < 0:
            raise ValueError(f"{self.square_sum} is no sum of squares")


@message(28)
class AdapterUpdate(Message):
    """Ask a peer to make a new adapter of one and its accumulated gradients, times `factor`.

    The new one takes the old one's place, and `make_updated_id` says what it is called: whoever
    asks again is told that it is there. The answer is `AdapterKept`.
    """

    pass_id: HeaderPass
    gradients: Annotated[GradientSum, Body(1)]
    settings: Annotated[OptimizerSettings, Spread()]
    factor: Annotated[float, Body(2, "double"), number_in(0, 1, "factor")] = 1.0


@message(29)
class AdapterFetch(Message):
    """Ask for an adapter that the peer trains; the answer is `AdapterHead`, and its pieces."""

    pass_id: HeaderPass
    adapter: _BodyAdapter


@message(31)
class PublicationFetch(Message):
    """Ask for the leaves of some blocks of a published adapter that the peer holds.

    The answer is `AdapterHead` with the manifest, the leaves in pieces, and `AdapterKept`: for how
    long the adapter stays published unless that is renewed. Without blocks the answer is the last
    alone. So a publisher renews what it has published, and a peer that has fetched a copy learns
    whether it is published still.
    """

    pass_id: HeaderPass
    adapter: _BodyAdapter
    first_block: Annotated[int, Body(2, "uint32"), index_below(limits.MAX_BLOCKS)] = 0
    num_blocks: Annotated[int, Body(3, "uint32"), number_in(0, limits.MAX_BLOCKS, "blocks")] = 0

    @property
    def span(self) -> Span | None:
        """The blocks; None if it asks for no leaves."""
        stop = self.first_block + self.num_blocks
        return Span(self.first_block, stop) if self.num_blocks else None


def make_updated_id(update: AdapterUpdate) -> AdapterId:
    """Return the name of what an update makes, which follows from all that goes into it."""
    gradients, settings = update.gradients, update.settings
    digest = hashlib.sha256(b"updated" + gradients.adapter)
    digest.update(
        struct.pack(
            f"<QI{len(gradients.parts)}I", gradients.number, len(gradients.parts), *gradients.parts
        )
    )
    numbers = (getattr(settings, field.name) for field in fields(settings))
    digest.update(struct.pack("<8d", *numbers, update.factor))
    return AdapterId(digest.digest())


def cut_adapter(upload_id: UploadId, *files: bytes | bytearray) -> Iterator[AdapterPiece]:
    """Yield the files of an adapter, one behind the other, in pieces."""
    offset, data = 0, bytearray()
    for file in files:
        for start in range(0, len(file), PIECE_BYTES):
            data += file[start : start + PIECE_BYTES]
            if len(data) >= PIECE_BYTES:
                yield AdapterPiece(upload_id, offset, bytes(data[:PIECE_BYTES]))
                del data[:PIECE_BYTES]
                offset += PIECE_BYTES
    if data:
        yield AdapterPiece(upload_id, offset, bytes(data))


def allow_upload_seconds(num_bytes: int) -> float:
    """Return how long so many bytes may be on their way, if they never stand still for too long."""
    return STALL_SECONDS + num_bytes / SLOWEST_BYTES_PER_SECOND


class UploadPace:
    """Until when more of an adapter has to come.

    Every piece gives as much time as it may take on the slowest line, and never more than
    `STALL_SECONDS` are left.
    """

    def __init__(self, now: float) -> None:
        self.deadline = now + STALL_SECONDS
        """When it has stood still for too long, or been too slow."""

    def note_piece(self, num_bytes: int, now: float) -> None:
        """Note that so many bytes have come."""
        earned = self.deadline + num_bytes / SLOWEST_BYTES_PER_SECOND
        self.deadline = min(earned, now + STALL_SECONDS)


class AdapterReader:
    """Takes the pieces that `cut_adapter` makes, in their order."""

    def __init__(self, head: AdapterHead) -> None:
        self._head = head
        self._pieces: list[bytes] = []
        self._num_taken = 0

    @property
    def is_complete(self) -> bool:
        """Whether nothing is missing any more."""
        return self._num_taken == self._head.num_bytes

    def take(self, piece: AdapterPiece) -> None:
        """Take the next piece. Raises RemoteProtocolError for any other."""
        expected = min(PIECE_BYTES, self._head.num_bytes - self._num_taken)
        if (piece.offset, len(piece.data)) != (self._num_taken, expected):
            raise RemoteProtocolError(
                f"a piece of an adapter has {len(piece.data)} bytes at {piece.offset}; the next "
                f"one has {expected} at {self._num_taken}"
            )
        self._pieces.append(piece.data)
        self._num_taken += expected

    def join(self) -> bytes:
        """Return the safetensors; nothing is kept here."""
        joined, self._pieces = b"".join(self._pieces), []
        return joined
