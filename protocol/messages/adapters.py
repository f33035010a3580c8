"""What is said about adapters: a client brings one, and rows of a batch name it."""

import hashlib
import struct
from dataclasses import dataclass, fields
from enum import IntEnum

from ..ids import NO_ADAPTER, AdapterId, PassId, UploadId


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
class OptimizerSettings:
    """The numbers of one update, as torch's AdamW and SGD understand them.

    SGD uses the rate, the decay and the momentum; AdamW all but the momentum.
    """

    kind: OptimizerKind
    learning_rate: float
    weight_decay: float = 0.0
    momentum: float = 0.0
    beta1: float = 0.0
    beta2: float = 0.0
    epsilon: float = 0.0


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
    client that brought it may name it, unless `is_published`. The answer is `AdapterKept`; of one
    that the client has published before it comes at once, and pieces are not needed.

    With an `optimizer` the peer is to train it, see `AdapterUpdate`. If it has learned before, the
    optimizer's moments follow its matrices, each as safetensors of the same names and sizes, and
    `num_updates` says how many updates they come from. A peer answers `AdapterFetch` in this form.

    `num_trained` are the numbers that gradients will be asked for, 0 if they will not: a peer
    without memory for them declines before the adapter is on its way.
    """

    upload_id: UploadId
    adapter: AdapterId
    config: bytes
    num_bytes: int
    is_published: bool = False
    replaces: AdapterId = NO_ADAPTER
    optimizer: OptimizerKind = OptimizerKind.NONE
    num_updates: int = 0
    num_trained: int = 0

    @property
    def num_files(self) -> int:
        """How many safetensors of one size there are."""
        return 1 + self.optimizer.num_moments if self.num_updates else 1


@dataclass(frozen=True, slots=True)
class AdapterPiece:
    """Some bytes of the safetensors, from the one at `offset` on."""

    upload_id: UploadId
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class AdapterKept:
    """The adapter may be named, until its holder has not used it for so long."""

    upload_id: UploadId
    keep_seconds: float


@dataclass(frozen=True, slots=True)
class AdapterWithdrawal:
    """Ask a peer to forget an adapter that this client has brought, for itself or for everybody.

    Sessions and passes that have it go on with it. The answer is `AdapterKept`, for 0 seconds, also
    where the adapter is not there.
    """

    pass_id: PassId
    adapter: AdapterId


@dataclass(frozen=True, slots=True)
class GradientSum:
    """Gradients that a peer has gathered for an adapter: exactly those of these `parts`.

    A `number` grows with each sum of an adapter; a larger one lets the sum before be forgotten.
    """

    adapter: AdapterId
    number: int
    parts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GatherOrder:
    """Add the gradients of a pass to a sum, times `scale`, as one part, if it is not in there."""

    number: int
    part: int
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class AdapterMeasure:
    """Ask how large the gathered gradients of an adapter are; nothing changes."""

    pass_id: PassId
    gradients: GradientSum


@dataclass(frozen=True, slots=True)
class AdapterMeasured:
    """The sum of the squares of all of these gradients."""

    pass_id: PassId
    square_sum: float


@dataclass(frozen=True, slots=True)
class AdapterUpdate:
    """Ask a peer to make a new adapter of one and its gathered gradients, times `factor`.

    The new one takes the old one's place, and `make_updated_id` says what it is called: whoever
    asks again is told that it is there. The answer is `AdapterKept`.
    """

    pass_id: PassId
    gradients: GradientSum
    settings: OptimizerSettings
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class AdapterFetch:
    """Ask for an adapter that the peer trains; the answer is `AdapterHead`, and its pieces."""

    pass_id: PassId
    adapter: AdapterId


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
