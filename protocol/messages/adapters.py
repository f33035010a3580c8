"""What is said about adapters: a client brings one, and rows of a batch name it."""

import hashlib
import math
import struct
from dataclasses import dataclass, fields
from enum import IntEnum
from itertools import pairwise
from typing import Annotated

from .. import limits
from ..ids import NO_ADAPTER, AdapterId, UploadId
from .checks import (
    check_adapter,
    check_count,
    check_number,
    check_seconds,
    check_session,
    count_to,
    index_below,
    not_empty,
    number_in,
)
from .fields import Body, Header, HeaderPass, Message, Record, Spread, message

_MOST_NUMBERS = 2**32
_LEAST_EPSILON = 1e-30

_HeaderUpload = Annotated[UploadId, Header("session"), check_session]


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


@message(23)
class AdapterHead(Message):
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

    upload_id: _HeaderUpload
    adapter: Annotated[
        AdapterId,
        Body(1, "bytes"),
        check_adapter,
        not_empty("an adapter that is brought has a digest"),
    ]
    config: Annotated[bytes, Body(2, "bytes")]
    num_bytes: Annotated[int, Body(3, "uint32")]
    is_published: Annotated[bool, Body(4, "bool")] = False
    replaces: Annotated[AdapterId, Body(5, "bytes"), check_adapter] = NO_ADAPTER
    optimizer: Annotated[OptimizerKind, Body(6, "uint32")] = OptimizerKind.NONE
    num_updates: Annotated[int, Body(7, "uint32")] = 0
    num_trained: Annotated[
        int, Body(8, "uint32"), number_in(0, limits.MAX_ADAPTER_BYTES, "number of trained numbers")
    ] = 0

    def check(self) -> None:
        """Raise ValueError unless the sizes fit, and the optimizer what it has done."""
        bound = limits.MAX_ADAPTER_BYTES * self.num_files
        check_count(self.num_bytes, bound, "size of an adapter")
        check_count(len(self.config), limits.MAX_ADAPTER_CONFIG_BYTES, "size of a configuration")
        if self.optimizer is OptimizerKind.NONE and self.num_updates:
            raise ValueError("what was updated has an optimizer")
        if self.optimizer and self.is_published:
            raise ValueError("an adapter that is published does not learn any more")
        if self.num_bytes % self.num_files:
            raise ValueError(f"{self.num_bytes} bytes are not {self.num_files} files of one size")

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
    """The adapter may be named, until its holder has not used it for so long."""

    upload_id: _HeaderUpload
    keep_seconds: Annotated[float, Body(1, "float"), check_seconds]


@message(30)
class AdapterWithdrawal(Message):
    """Ask a peer to forget an adapter that this client has brought, for itself or for everybody.

    Sessions and passes that have it go on with it. The answer is `AdapterKept`, for 0 seconds, also
    where the adapter is not there.
    """

    pass_id: HeaderPass
    adapter: Annotated[
        AdapterId,
        Body(1, "bytes"),
        check_adapter,
        not_empty("an adapter that is withdrawn has a digest"),
    ]


@dataclass(frozen=True, slots=True)
class GradientSum(Record):
    """Gradients that a peer has gathered for an adapter: exactly those of these `parts`.

    A `number` grows with each sum of an adapter; a larger one lets the sum before be forgotten.
    """

    adapter: Annotated[
        AdapterId, Body(1, "bytes"), check_adapter, not_empty("gradients belong to an adapter")
    ]
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
    """Ask how large the gathered gradients of an adapter are; nothing changes."""

    pass_id: HeaderPass
    gradients: Annotated[GradientSum, Body(1)]

    def check(self) -> None:
        """Raise ValueError for gradients that nobody has gathered."""
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
    """Ask a peer to make a new adapter of one and its gathered gradients, times `factor`.

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
    adapter: Annotated[
        AdapterId,
        Body(1, "bytes"),
        check_adapter,
        not_empty("an adapter that is fetched has a digest"),
    ]


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
