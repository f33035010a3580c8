"""The messages of a training run: parts through stages, sums of gradients, state, decisions.

A member of the run asks one thing at a time on a stream and waits for the answer. What is large
goes in `RunPiece`s, behind the message that says how many bytes they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated

from .. import limits
from ..errors import RemoteProtocolError
from ..identity import SIGNATURE_BYTES, Identity, verify
from ..ids import MemberId, PeerId, RunId, SessionId
from ..tensors import WireDtype, WireTensor, check_tensor, compute_num_bytes
from .fields import (
    Body,
    Check,
    Header,
    HeaderSession,
    Message,
    Record,
    check_number,
    check_seconds,
    message,
    number_in,
    sized,
    sized_or_none,
)

SUM_BYTES = 8
"""Of one number of a sum: a whole number in float64."""

MAX_STAGE_WEIGHTS = 4096
"""Tensors of one stage whose norms are told."""

_CONTEXT = b"shoal run hello 1"
_ELEMENT_BYTES = 4
_WIDTH = 2**16
_PIECE_BYTES = 4 * 2**20
_DIGEST_BYTES = 32
_ATTEMPT_BYTES = 16


def _below(bound: int, name: str) -> Check:
    """Return a check for a whole number from 0 to below a bound."""
    return lambda value: check_number(value, 0, bound - 1, name)


def _check_member(value: str) -> None:
    if not 1 <= len(value) <= limits.MAX_MEMBER_ID_CHARACTERS or not value.isprintable():
        raise ValueError("a malformed member id")


def _check_members(values: tuple[str, ...]) -> None:
    if len(values) > limits.MAX_RUN_MEMBERS or len(set(values)) < len(values):
        raise ValueError("too many members, or one of them twice")
    for value in values:
        _check_member(value)


def _check_route(values: tuple[str, ...]) -> None:
    if len(values) > limits.MAX_STAGES:
        raise ValueError("a route has more members than a run has stages")
    for value in values:
        _check_member(value)


def _check_norms(value: bytes) -> None:
    if len(value) % 8 or len(value) > 8 * MAX_STAGE_WEIGHTS:
        raise ValueError(f"{len(value)} bytes are no norms of the weights of a stage")


def _check_parts(value: bytes) -> None:
    if len(value) > limits.MAX_PARTS // 8:
        raise ValueError(f"a set of parts has {len(value)} bytes")


_Update = Annotated[int, Body(1, "uint32"), _below(limits.MAX_UPDATES, "update")]
_Part = Annotated[int, Body(2, "uint32"), _below(limits.MAX_PARTS, "index of a part")]
_NumBytes = Annotated[
    int, Header("position"), _below(limits.MAX_RUN_TENSOR_BYTES + 1, "number of bytes")
]
_Route = Annotated[tuple[MemberId, ...], Body(3, "string"), _check_route]


@message(34)
class RunPiece(Message):
    """The bytes of something large from `offset` on, as elements of four bytes each."""

    question: HeaderSession
    offset: Annotated[int, Header("position"), _below(limits.MAX_RUN_TENSOR_BYTES, "offset")]
    tensor: Annotated[WireTensor, Header("tensor"), check_tensor]


@message(48)
class RunHello(Message):
    """A member of a run says who it is, once on a stream, before it asks anything.

    `receiver` is the member that it wants to ask; None: whatever this peer is. `signature` is made
    with the key of the peer that the sender is a process of, see `make_run_hello`.
    """

    question: HeaderSession
    run_id: Annotated[bytes, Body(1, "bytes"), sized(_DIGEST_BYTES, "the id of a run")]
    sender: Annotated[MemberId, Body(2, "string"), _check_member]
    receiver: Annotated[MemberId | None, Body(3, "string"), _check_member]
    signature: Annotated[bytes, Body(4, "bytes"), sized(SIGNATURE_BYTES, "a signature")]


@message(49)
class RunWelcome(Message):
    """The peer takes questions of this member on the stream."""

    question: HeaderSession


@message(35)
class PartPass(Message):
    """Run a part forward and backward from the receiver's stage on; `PartPassed` answers.

    `route` names a member of each stage that follows. A member that has counted the part does not
    compute it again, but hands it on while a later stage up to `last_stage` may lack it. `without`:
    this member takes the part out of its sums instead. The inputs follow, of `num_bytes`: none for
    the first stage, and for the member that begins with what it has counted.
    """

    question: HeaderSession
    num_bytes: _NumBytes
    update: _Update
    index: _Part
    route: _Route = ()
    last_stage: Annotated[int, Body(4, "uint32"), _below(limits.MAX_STAGES, "stage")] = 0
    without: Annotated[MemberId | None, Body(5, "string"), _check_member] = None
    wants_gradients: Annotated[bool, Body(6, "bool")] = False


@message(36)
class PartPassed(Message):
    """A part is counted at the answering stage and all that follow, by the members of `route`.

    The gradients of the inputs follow, of `num_bytes`; none unless they are wanted.
    """

    question: HeaderSession
    num_bytes: _NumBytes
    loss: Annotated[float, Body(1, "double"), number_in(-1e30, 1e30, "loss")]
    compute_seconds: Annotated[float, Body(2, "double"), check_seconds]
    route: _Route


@message(37)
class PartsFetch(Message):
    """The leader of a run asks which parts a member has counted; `PartsCounted` answers."""

    question: HeaderSession
    number: Annotated[int, Body(1, "uint32")]
    """Of the newest decision that the leader knows."""


@message(38)
class PartsCounted(Message):
    """What a member has counted of the update that is under way.

    Bit i of `parts` stands for part i. A member without the state of its stage is not ready.
    """

    question: HeaderSession
    update: _Update
    number: Annotated[int, Body(2, "uint32")]
    """Of the newest decision that it knows."""
    is_ready: Annotated[bool, Body(3, "bool")]
    parts: Annotated[bytes, Body(4, "bytes"), _check_parts] = b""
    state: Annotated[bytes, Body(5, "bytes"), sized_or_none(_DIGEST_BYTES, "a digest")] = b""
    """Digest of weights and optimizer before the update, equal at all members of a stage."""


@message(39)
class Reduction(Message):
    """Sum the gradients of an update with the mates; `Reduced` answers.

    `parts` are those that the receiver's own sums must hold. `mates` hold the same stage, in an
    order that is the same for all; `tied` hold the first and the last one, whose tied weights have
    one sum.
    """

    question: HeaderSession
    update: _Update
    attempt: Annotated[bytes, Body(2, "bytes"), sized(_ATTEMPT_BYTES, "an attempt")]
    parts: Annotated[bytes, Body(3, "bytes"), _check_parts]
    mates: Annotated[tuple[MemberId, ...], Body(4, "string"), _check_members]
    tied: Annotated[tuple[MemberId, ...], Body(5, "string"), _check_members] = ()


@message(40)
class Reduced(Message):
    """The gradient of an update, as the answering member has it.

    `digest` is of the sums of its stage. `squared_norms` are those of its weights, as float64 in
    their order; the last stage leaves out tied weights, as the first one has them.
    """

    question: HeaderSession
    digest: Annotated[bytes, Body(1, "bytes"), sized(_DIGEST_BYTES, "a digest")]
    squared_norms: Annotated[bytes, Body(2, "bytes"), _check_norms]
    loss: Annotated[float, Body(3, "double"), number_in(-1e30, 1e30, "loss")]
    """The sum over the parts that the member has counted, at the last stage."""


class SumGroup(IntEnum):
    """Which members sum which weights together."""

    STAGE = 0
    """Those of one stage: its weights, but for tied ones."""

    TIED = 1
    """Those of the first and the last stage: the weights that both have."""


@message(41)
class SumFetch(Message):
    """Ask for some numbers of a member's own sums, or of the reduced ones; `Sums` answers."""

    question: HeaderSession
    update: _Update
    attempt: Annotated[bytes, Body(2, "bytes"), sized(_ATTEMPT_BYTES, "an attempt")]
    group: Annotated[SumGroup, Body(3, "uint32")]
    is_reduced: Annotated[bool, Body(4, "bool")]
    start: Annotated[int, Body(5, "uint64"), _below(limits.MAX_RUN_TENSOR_BYTES, "start")]
    stop: Annotated[int, Body(6, "uint64"), _below(limits.MAX_RUN_TENSOR_BYTES, "stop")]

    def check(self) -> None:
        """Raise ValueError unless something is asked for."""
        if self.start >= self.stop:
            raise ValueError(f"numbers {self.start}:{self.stop} are none")


@message(42)
class Sums(Message):
    """The numbers follow, of `num_bytes`."""

    question: HeaderSession
    num_bytes: _NumBytes


@message(43)
class StateFetch(Message):
    """Ask for the state of the receiver's stage before an update; `StateFollows` answers."""

    question: HeaderSession
    update: _Update


@message(44)
class StateFollows(Message):
    """The state follows, as safetensors of `num_bytes`."""

    question: HeaderSession
    num_bytes: _NumBytes


class VoteKind(IntEnum):
    """What a message of the chain of decisions says."""

    PREPARE = 1
    PROMISE = 2
    ACCEPT = 3
    ACCEPTED = 4
    REFUSAL = 5
    DECIDED = 6


@dataclass(frozen=True, slots=True)
class WireBallot(Record):
    """A ballot for a decision."""

    attempt: Annotated[int, Body(1, "uint32")]
    proposer: Annotated[MemberId, Body(2, "string"), _check_member]


@dataclass(frozen=True, slots=True)
class WireMember(Record):
    """A member of a run, and the stage that it holds, from 1 on; 0: none."""

    id: Annotated[MemberId, Body(1, "string"), _check_member]
    stage: Annotated[int, Body(2, "uint32"), _below(limits.MAX_STAGES + 1, "stage")]


@dataclass(frozen=True, slots=True)
class WireDecision(Record):
    """A decision of a run."""

    number: Annotated[int, Body(1, "uint32")]
    previous: Annotated[bytes, Body(2, "bytes"), sized(_DIGEST_BYTES, "a digest")]
    members: Annotated[tuple[WireMember, ...], Body(3)]
    value: Annotated[bytes, Body(4, "bytes")]


@message(45)
class Vote(Message):
    """One message of the chain of decisions (`protocol/runs/decisions.py`); the answer is another
    one, or `Voted`.
    """

    question: HeaderSession
    kind: Annotated[VoteKind, Body(1, "uint32")]
    number: Annotated[int, Body(2, "uint32")] = 0
    ballot: Annotated[WireBallot | None, Body(3)] = None
    accepted: Annotated[WireBallot | None, Body(4)] = None
    decision: Annotated[WireDecision | None, Body(5)] = None


@message(46)
class Voted(Message):
    """There is no answer to a `Vote`."""

    question: HeaderSession


@message(47)
class RunJoin(Message):
    """A peer asks the leader of a run to make it a member; the answer is the
    newest decision, as `Vote`.

    `stage` is the one that it wants to hold, from 1 on; 0: where it helps most.
    """

    question: HeaderSession
    member: Annotated[MemberId, Body(1, "string"), _check_member]
    stage: Annotated[int, Body(2, "uint32"), _below(limits.MAX_STAGES + 1, "stage")] = 0


Question = PartPass | PartsFetch | Reduction | SumFetch | StateFetch | Vote | RunJoin
"""What a member asks of another one."""


def find_peer_id(member: MemberId) -> PeerId:
    """Return the peer of which a member is one process."""
    return PeerId(member.partition("/")[0])


def make_run_hello(
    question: SessionId,
    identity: Identity,
    nonce: bytes,
    run_id: RunId,
    sender: MemberId,
    peer_id: PeerId,
    receiver: MemberId | None,
) -> RunHello:
    """Return what a process of ours says to a peer that said this nonce in its Welcome."""
    signature = identity.sign(_make_signed(nonce, run_id, sender, peer_id))
    return RunHello(question, bytes.fromhex(run_id), sender, receiver, signature)


def check_run_hello(hello: RunHello, nonce: bytes, own_peer_id: PeerId) -> None:
    """Raise RemoteProtocolError unless the sender is a process of the peer that it names."""
    signed = _make_signed(nonce, RunId(hello.run_id.hex()), hello.sender, own_peer_id)
    if not nonce or not verify(find_peer_id(hello.sender), signed, hello.signature):
        raise RemoteProtocolError("this is not the member of a run that it says it is")


def _make_signed(nonce: bytes, run_id: RunId, sender: MemberId, peer_id: PeerId) -> bytes:
    return b"\0".join((_CONTEXT, run_id.encode(), sender.encode(), peer_id.encode(), nonce))


def cut_bytes(question: SessionId, data: bytes | memoryview) -> Iterator[RunPiece]:
    """Yield the pieces of something large, whose length is a multiple of four."""
    view = memoryview(data).cast("B")
    offset = 0
    while offset < len(view):
        shape = _choose_shape(len(view) - offset)
        stop = offset + compute_num_bytes(WireDtype.FP32, *shape)
        tensor = WireTensor(WireDtype.FP32, *shape, view[offset:stop])
        yield RunPiece(question, offset, tensor)
        offset = stop


def _choose_shape(num_bytes: int) -> tuple[int, int, int]:
    """Return the shape of the next piece, of 4 MiB at most."""
    num_elements = min(num_bytes, _PIECE_BYTES) // _ELEMENT_BYTES
    return (1, num_elements // _WIDTH, _WIDTH) if num_elements >= _WIDTH else (1, 1, num_elements)


class BytesReader:
    """Puts the pieces of something large together."""

    def __init__(self, question: SessionId, num_bytes: int) -> None:
        """Expect so many bytes, which the caller has a bound for. Raises RemoteProtocolError."""
        if num_bytes % _ELEMENT_BYTES:
            raise RemoteProtocolError(f"{num_bytes} bytes are no whole elements")
        self._question = question
        self._num_bytes = num_bytes
        self._data = bytearray()

    @property
    def is_complete(self) -> bool:
        """Whether nothing is missing any more."""
        return len(self._data) == self._num_bytes

    def take(self, piece: Message) -> None:
        """Take the next piece. Raises RemoteProtocolError for anything else."""
        if not isinstance(piece, RunPiece) or piece.question != self._question:
            raise RemoteProtocolError(f"{type(piece).__name__} came where a piece belongs")
        tensor = piece.tensor
        expected = len(self._data), _choose_shape(self._num_bytes - len(self._data))
        if (piece.offset, tensor.shape) != expected or tensor.dtype is not WireDtype.FP32:
            raise RemoteProtocolError(f"a piece {tensor.shape} at {piece.offset}, not {expected}")
        self._data += tensor.data

    def read(self) -> memoryview:
        """Return all bytes; they must be complete."""
        return memoryview(self._data)
