"""The messages of a training run: parts through stages, sums of gradients, state, decisions.

A member of the run asks one question at a time on a stream and waits for the answer. Tensors follow
a message in `RunPiece`s; its `num_bytes` is their length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from enum import IntEnum
from typing import Annotated, Self

from .. import limits
from ..errors import RemoteProtocolError
from ..identity import SIGNATURE_BYTES, Identity, verify
from ..ids import MemberId, PeerId, RunId, SessionId, find_peer_id
from ..runs import decisions
from ..runs.update_parts import (
    MemberManifest,
    pack_digests,
    pack_parts,
    unpack_digests,
    unpack_parts,
)
from ..tensors import WireDtype, WireTensor, check_tensor, compute_num_bytes
from .fields import (
    Body,
    Check,
    Header,
    HeaderSession,
    Message,
    Spread,
    check_number,
    check_text,
    clean_text,
    message,
    number_in,
    sized,
    sized_or_none,
)

_CONTEXT = b"shoal run hello 1"
_ELEMENT_BYTES = 4
_WIDTH = 2**16
PIECE_BYTES = 4 * 2**20
"""The most that a `RunPiece` carries."""

_DIGEST_BYTES = 32
_ATTEMPT_BYTES = 16
_check_digest_or_none = sized_or_none(_DIGEST_BYTES, "a digest")


def _below(bound: int, name: str) -> Check:
    """Return a check for a whole number from 0 to below a bound."""
    return lambda value: check_number(value, 0, bound - 1, name)


def _check_members(values: tuple[str, ...]) -> None:
    if len(values) > limits.MAX_RUN_MEMBERS or len(set(values)) < len(values):
        raise ValueError("too many members, or one of them twice")
    for value in values:
        decisions.check_member_id(value)


def _check_route(values: tuple[str, ...]) -> None:
    if len(values) > limits.MAX_STAGES:
        raise ValueError("a route has more members than a run has stages")
    for value in values:
        decisions.check_member_id(value)


def _check_stages(value: bytes) -> None:
    if len(value) > limits.MAX_STAGES // 8:
        raise ValueError(f"a set of stages has {len(value)} bytes")


def _check_parts(value: bytes) -> None:
    if len(value) > limits.MAX_PARTS // 8:
        raise ValueError(f"a set of parts has {len(value)} bytes")


def _read_parts(value: bytes) -> frozenset[int]:
    _check_parts(value)
    return frozenset(unpack_parts(value))


_Update = Annotated[int, Body(1, "uint32"), _below(limits.MAX_UPDATES, "update")]
_Part = Annotated[int, Body(2, "uint32"), _below(limits.MAX_PARTS, "index of a part")]
_NumBytes = Annotated[
    int, Header("position"), _below(limits.MAX_RUN_TENSOR_BYTES + 1, "number of bytes")
]
_Route = Annotated[tuple[MemberId, ...], Body(3, "string"), _check_route]

_BALLOT = {"attempt": Body(1, "uint32"), "proposer": Body(2, "string")}
_MEMBER = {"id": Body(1, "string"), "stage": Body(2, "uint32")}
_DECISION = {
    "number": Body(1, "uint32"),
    "previous": Body(2, "bytes"),
    "members": Body(3, parts=_MEMBER),
    "value": Body(4, "bytes"),
}
_NUMBER_AND_BALLOT = {"number": Body(1, "uint32"), "ballot": Body(2, parts=_BALLOT)}
_ACCEPT = {"ballot": Body(1, parts=_BALLOT), "decision": Body(2, parts=_DECISION)}
_PROMISE = {**_NUMBER_AND_BALLOT, "accepted": Body(3, parts=_ACCEPT)}
_REFUSAL = {"number": Body(1, "uint32"), "promised": Body(2, parts=_BALLOT)}
_DECIDED = {"decision": Body(1, parts=_DECISION)}
_MANIFEST = {
    "update": Body(1, "uint32"),
    "is_ready": Body(3, "bool"),
    "is_applying": Body(10, "bool"),
    "counted": Body(4, "bytes", write=pack_digests, read=unpack_digests),
    "audited": Body(15, "bytes", write=pack_digests, read=unpack_digests),
    "refused": Body(6, "bytes", write=pack_parts, read=_read_parts),
    "state": Body(5, "bytes"),
    "is_leaving": Body(7, "bool"),
    "accused": Body(8, "string"),
    "unreachable": Body(13, "string"),
    "part_seconds": Body(9, "double"),
    "part_wait_seconds": Body(14, "double"),
    "fetched_bytes": Body(11, "uint64"),
    "state_bytes": Body(12, "uint64"),
}


def _check_manifest(value: MemberManifest) -> None:
    """Raise ValueError for what no member of a run can tell."""
    check_number(value.update, 0, limits.MAX_UPDATES - 1, "update")
    for indices in (value.counted, value.audited, value.refused):
        check_number(max(indices, default=0), 0, limits.MAX_PARTS - 1, "index of a part")
    _check_digest_or_none(value.state)
    _check_members(value.accused)
    _check_members(value.unreachable)
    check_number(value.part_seconds, 0.0, 1e6, "seconds")
    check_number(value.part_wait_seconds, 0.0, 1e6, "seconds")
    check_number(value.state_bytes, 0, limits.MAX_RUN_TENSOR_BYTES - 1, "number of bytes")
    check_number(value.fetched_bytes, 0, value.state_bytes, "number of bytes")


@message(34)
class RunPiece(Message):
    """A piece of the tensors behind a message, from byte `offset` on, in elements of four bytes."""

    question: HeaderSession
    offset: Annotated[int, Header("position"), _below(limits.MAX_RUN_TENSOR_BYTES, "offset")]
    tensor: Annotated[WireTensor, Header("tensor"), check_tensor]


@message(48)
class RunHello(Message):
    """A member identifies itself on a stream, before its first question.

    `receiver` is the member that it wants to ask; None accepts any member that runs at this peer.
    `signature` is made with the key of the sender's peer, see `make_run_hello`.
    """

    question: HeaderSession
    run_id: Annotated[bytes, Body(1, "bytes"), sized(_DIGEST_BYTES, "the id of a run")]
    sender: Annotated[MemberId, Body(2, "string"), decisions.check_member_id]
    receiver: Annotated[MemberId | None, Body(3, "string"), decisions.check_member_id]
    signature: Annotated[bytes, Body(4, "bytes"), sized(SIGNATURE_BYTES, "a signature")]


@message(49)
class RunWelcome(Message):
    """The peer accepts the member's questions on this stream."""

    question: HeaderSession


@message(50)
class RunFetch(Message):
    """Somebody asks for the record of the run that the receiver trains; `RunFollows` answers.

    No `RunHello` comes before it: one who joins has to know the run first.
    """

    question: HeaderSession


@message(51)
class RunFollows(Message):
    """The record follows, of `num_bytes`: see `protocol/runs/run_record.py`."""

    question: HeaderSession
    num_bytes: Annotated[
        int, Header("position"), _below(limits.MAX_RUN_RECORD_BYTES + 1, "number of bytes")
    ]


@message(35)
class PartPass(Message):
    """Run a part forward and backward from the receiver's stage on; `PartPassed` answers.

    `route` names a member of each stage that follows. A member that has counted the part does not
    compute it again, but hands it on while a later stage up to `last_stage` may lack it. `without`:
    this member takes the part out of its sums instead. The inputs follow, of `num_bytes`: none for
    the first stage, and for the member that begins with what it has counted.

    `is_audit`: the member of `last_stage` computes the part and counts nothing, with what the
    members before and behind it have counted; `PartsCounted` tells the digest.
    """

    question: HeaderSession
    num_bytes: _NumBytes
    update: _Update
    index: _Part
    route: _Route = ()
    last_stage: Annotated[int, Body(4, "uint32"), _below(limits.MAX_STAGES, "stage")] = 0
    without: Annotated[MemberId | None, Body(5, "string"), decisions.check_member_id] = None
    wants_gradients: Annotated[bool, Body(6, "bool")] = False
    is_audit: Annotated[bool, Body(7, "bool")] = False
    num_restarts: Annotated[int, Body(8, "uint32"), _below(limits.MAX_RESTARTS, "restart")] = 0
    """How often the update was begun again before it."""


@message(36)
class PartPassed(Message):
    """A part is counted at the answering stage and all that follow, by the members of `route`.

    The gradients of the inputs follow, of `num_bytes`; none unless they are wanted.
    """

    question: HeaderSession
    num_bytes: _NumBytes
    loss: Annotated[float, Body(1, "double"), number_in(-1e30, 1e30, "loss")]
    route: _Route


@message(52)
class HeldOutPass(Message):
    """Run a held-out part forward from the receiver's stage on; `HeldOutPassed` answers.

    `route` names a member of each stage that follows. Nothing of it is kept. The inputs follow, of
    `num_bytes`, in float32 in every mode: none for the first stage.
    """

    question: HeaderSession
    num_bytes: _NumBytes
    update: _Update
    index: _Part
    route: _Route = ()


@message(53)
class HeldOutPassed(Message):
    """The loss of a held-out part, in nats per token."""

    question: HeaderSession
    loss: Annotated[float, Body(1, "double"), number_in(0.0, limits.MAX_HELD_OUT_LOSS, "loss")]


@message(37)
class PartsFetch(Message):
    """The leader of a run asks which parts a member has counted; `PartsCounted` answers."""

    question: HeaderSession
    decided: Annotated[decisions.Decided, Body(1, parts=_DECIDED)]
    """The newest decision that the leader knows."""
    waits_for: Annotated[str, Body(2, "string", write=clean_text), check_text] = ""
    """What the run waits for, for people; empty: nothing."""


@message(38)
class PartsCounted(Message):
    """A member tells the parts of the current update that it has counted, and how far it is."""

    question: HeaderSession
    number: Annotated[int, Body(2, "uint32")]
    """The number of the newest decision that the member knows."""
    manifest: Annotated[MemberManifest, Spread(_MANIFEST), _check_manifest]


@message(39)
class Reduction(Message):
    """The leader asks a member to sum the gradients of an update with its mates; `Reduced` answers.

    The receiver's own sums must hold exactly `parts`. `mates` are the members of its stage, in an
    order that is the same for all. `tied` are the members of the first and the last stage, which
    sum tied weights together.
    """

    question: HeaderSession
    update: _Update
    attempt: Annotated[bytes, Body(2, "bytes"), sized(_ATTEMPT_BYTES, "an attempt")]
    parts: Annotated[bytes, Body(3, "bytes"), _check_parts]
    mates: Annotated[tuple[MemberId, ...], Body(4, "string"), _check_members]
    tied: Annotated[tuple[MemberId, ...], Body(5, "string"), _check_members] = ()


@message(40)
class Reduced(Message):
    """A member has the summed gradients of an update.

    `digest` is of the sums of its stage. `squared_norm` is that of its gradient; the last stage
    leaves out tied weights, as the first one has them.
    """

    question: HeaderSession
    digest: Annotated[bytes, Body(1, "bytes"), sized(_DIGEST_BYTES, "a digest")]
    squared_norm: Annotated[float, Body(2, "double"), number_in(0.0, 1e300, "norm")]
    loss: Annotated[float, Body(3, "double"), number_in(0.0, 1e30, "loss")]
    """Sum of the losses of the member's counted parts, at the last stage; 0 at others."""


class SumGroup(IntEnum):
    """A group of members that sums gradients, and the weights that they are of."""

    STAGE = 0
    """The members of one stage: its weights, except for tied ones."""

    TIED = 1
    """The members of the first and the last stage: the weights that both have."""


@message(41)
class SumFetch(Message):
    """A member asks a mate for a slice of its gradient sums; `Sums` answers.

    The slice is of the mate's own sums, or of the reduced ones.
    """

    question: HeaderSession
    attempt: Annotated[bytes, Body(1, "bytes"), sized(_ATTEMPT_BYTES, "an attempt")]
    group: Annotated[SumGroup, Body(2, "uint32")]
    is_reduced: Annotated[bool, Body(3, "bool")]
    start: Annotated[int, Body(4, "uint64"), _below(limits.MAX_RUN_TENSOR_BYTES, "start")]
    stop: Annotated[int, Body(5, "uint64"), _below(limits.MAX_RUN_TENSOR_BYTES, "stop")]

    def check(self) -> None:
        """Raise ValueError unless something is asked for."""
        if self.start >= self.stop:
            raise ValueError(f"numbers {self.start}:{self.stop} are none")


@message(42)
class Sums(Message):
    """The slice follows, of `num_bytes`."""

    question: HeaderSession
    num_bytes: _NumBytes


class StatePart(IntEnum):
    """The part of a stage's state that a StateFetch asks for."""

    ALL = 0
    """Weights and optimizer state, for members of the run only."""

    WEIGHTS = 1
    """The weights alone, for any peer that the run admits."""

    DIGEST = 2
    """Nothing but the digest."""


@message(43)
class StateFetch(Message):
    """A peer asks for the state of the receiver's stage before an update, or for a part of it.

    `StateFollows` answers.
    """

    question: HeaderSession
    update: _Update
    part: Annotated[StatePart, Body(2, "uint32")] = StatePart.ALL


@message(44)
class StateFollows(Message):
    """The state follows, of `num_bytes`: its tensors in the order of their names, each from a
    multiple of eight bytes on.

    `digest` is that of the whole state, made of the SHA-256 of its weights and of `rest`, the one
    of all others.
    """

    question: HeaderSession
    num_bytes: _NumBytes
    digest: Annotated[bytes, Body(1, "bytes"), sized(_DIGEST_BYTES, "a digest")]
    rest: Annotated[bytes, Body(2, "bytes"), sized(_DIGEST_BYTES, "a digest")]


@message(45)
class Vote(Message):
    """One message of the chain of decisions (`protocol/runs/decisions.py`).

    The answer is another one, or `Voted`.
    """

    question: HeaderSession
    prepare: Annotated[decisions.Prepare | None, Body(1, parts=_NUMBER_AND_BALLOT)] = None
    promise: Annotated[decisions.Promise | None, Body(2, parts=_PROMISE)] = None
    accept: Annotated[decisions.Accept | None, Body(3, parts=_ACCEPT)] = None
    accepted: Annotated[decisions.Accepted | None, Body(4, parts=_NUMBER_AND_BALLOT)] = None
    refusal: Annotated[decisions.Refusal | None, Body(5, parts=_REFUSAL)] = None
    decided: Annotated[decisions.Decided | None, Body(6, parts=_DECIDED)] = None

    @classmethod
    def make(cls, question: SessionId, content: decisions.Message) -> Self:
        """Return the vote that carries a message of the chain."""
        return replace(cls(question), **{type(content).__name__.lower(): content})

    @property
    def content(self) -> decisions.Message:
        """The message of the chain that it carries."""
        (content,) = self._list()
        return content

    def check(self) -> None:
        """Raise ValueError unless it carries exactly one message."""
        if len(self._list()) != 1:
            raise ValueError(f"a vote carries one message, not {len(self._list())}")

    def _list(self) -> list[decisions.Message]:
        carried = (
            self.prepare, self.promise, self.accept, self.accepted, self.refusal, self.decided,
        )  # fmt: skip
        return [content for content in carried if content is not None]


@message(46)
class Voted(Message):
    """The receiver of a `Vote` has no message to answer it with."""

    question: HeaderSession


@message(47)
class RunJoin(Message):
    """A peer asks the leader of a run to make it a member.

    The answer is the newest decision, as `Vote`. `compute_class` is the digest of what its machine
    computes, which must be that of the run; without one, the peer becomes no member, and only wants
    the answer. Bit i of `stages` says that the peer can hold stage i; it gets the one of them with
    the fewest members.
    """

    question: HeaderSession
    member: Annotated[MemberId, Body(1, "string"), decisions.check_member_id]
    compute_class: Annotated[bytes, Body(3, "bytes"), _check_digest_or_none]
    stages: Annotated[bytes, Body(2, "bytes"), _check_stages] = b""


Question = PartPass | HeldOutPass | PartsFetch | Reduction | SumFetch | StateFetch | Vote | RunJoin
"""Messages that a member sends to another one, which answers each of them."""


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
    num_elements = min(num_bytes, PIECE_BYTES) // _ELEMENT_BYTES
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
    def num_taken(self) -> int:
        """How many bytes have come."""
        return len(self._data)

    @property
    def is_complete(self) -> bool:
        """Whether nothing is missing any more."""
        return len(self._data) == self._num_bytes

    def take(self, piece: Message) -> None:
        """Take the next piece. Raises RemoteProtocolError for anything else."""
        if not isinstance(piece, RunPiece) or piece.question != self._question:
            raise RemoteProtocolError(f"{type(piece).__name__} came where a piece belongs")
        tensor = piece.tensor
        num_taken = len(self._data)
        expected = num_taken, _choose_shape(self._num_bytes - num_taken)
        if (piece.offset, tensor.shape) != expected or tensor.dtype is not WireDtype.FP32:
            raise RemoteProtocolError(f"a piece {tensor.shape} at {piece.offset}, not {expected}")
        self._data += tensor.data

    def read(self) -> memoryview:
        """Return all bytes; they must be complete."""
        return memoryview(self._data)
