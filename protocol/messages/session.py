"""The messages of sessions and chains: how a stream begins, how steps travel and move.

The dialler says `Hello`, the peer answers `Welcome`. For each session the client sends `Open` and
gets `Opened`, perhaps `Queued` before, then `Step` and gets `Output` (or `Gap`), then `Close`.
Anything can be answered by `Declined`.

In a chain a peer pushes its outputs to the next one, as `Step` behind an `Attach`, and only the
last peer answers the client, which keeps a stream to each for `Admit`, `Redirect`, `Mirror` and
`Probe`. A peer that is about to stop says `Leaving` to the client of every session.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, NamedTuple, Self

from .. import limits
from ..endpoints import Endpoint, check_endpoint
from ..errors import CacheFullError, ErrorCode, RefusedError, RemoteProtocolError, ShoalError
from ..ids import (
    CAPABILITY_BYTES,
    CLIENT_TOKEN_BYTES,
    NO_ADAPTER,
    NO_CAPABILITY,
    NO_CLIENT,
    NO_SESSION,
    OFFER_NONCE_BYTES,
    AdapterId,
    Capability,
    ClientToken,
    ModelId,
    PeerId,
    SessionId,
)
from ..spans import Span
from ..tensors import KVFormat, WireDtype, WireTensor, check_tensor
from .fields import (
    Body,
    Flag,
    Header,
    HeaderEpoch,
    HeaderSequence,
    HeaderSession,
    Message,
    Record,
    Spread,
    check_adapter,
    check_count,
    check_model_id,
    check_position,
    check_seconds,
    check_session,
    check_span,
    check_text,
    clean_text,
    count_to,
    message,
    sized,
    sized_or_none,
)

NO_MODEL_ID = ModelId("")


def _check_model_id_or_none(value: str) -> None:
    if value:
        check_model_id(value)


_HeaderPosition = Annotated[int, Header("position"), check_position]
_HeaderTensor = Annotated[WireTensor, Header("tensor"), check_tensor]


@message(1)
class Hello(Message):
    """First message of the dialler: which protocol versions it speaks.

    Streams and sessions of one `client` are counted together; those without a name are counted
    together for each address. `model_id` says what a peer is asked about that does several things;
    empty: about the model of whose blocks it serves some.
    """

    min_version: Annotated[int, Body(1, "uint32")]
    max_version: Annotated[int, Body(2, "uint32")]
    software: Annotated[str, Body(3, "string"), check_text]
    client: Annotated[
        ClientToken, Body(4, "bytes"), sized_or_none(CLIENT_TOKEN_BYTES, "a client's name")
    ] = NO_CLIENT
    model_id: Annotated[ModelId, Body(5, "string"), _check_model_id_or_none] = NO_MODEL_ID


@message(2)
class Welcome(Message):
    """The peer's answer: the version to speak, who it is, what it serves, and its clock.

    The `nonce`, made for this stream, is for an `Offer` to sign; a peer that takes none has none.
    """

    version: Annotated[int, Body(1, "uint32")]
    software: Annotated[str, Body(2, "string"), check_text]
    peer_id: Annotated[PeerId, Body(3, "string"), check_text]
    model_id: Annotated[ModelId, Body(4, "string"), check_model_id]
    span: Annotated[
        Span, Spread({"start": Body(5, "uint32"), "stop": Body(6, "uint32")}), check_span
    ]
    wall_seconds: Annotated[float, Body(7, "double"), check_seconds]
    nonce: Annotated[bytes, Body(8, "bytes"), sized_or_none(OFFER_NONCE_BYTES, "a nonce")] = b""


class HopSeconds(NamedTuple):
    """How long a step waited and was computed at one hop."""

    queue: float
    compute: float


def _write_hops(before: tuple[HopSeconds, ...]) -> list[float]:
    """Return the times of hops one behind the other."""
    return [seconds for hop in before for seconds in hop]


def _read_hops(seconds: Sequence[float]) -> tuple[HopSeconds, ...]:
    if len(seconds) % 2:
        raise ValueError("a hop has two times")
    return tuple(map(HopSeconds, seconds[::2], seconds[1::2]))


def _check_hops(before: tuple[HopSeconds, ...]) -> None:
    if len(before) > limits.MAX_HOPS:
        raise ValueError(f"{len(before)} hops are more than a route may have")
    for hop in before:
        check_seconds(hop.queue)
        check_seconds(hop.compute)


def _locate_hops(number: int) -> Body:
    """Return the location of times in a body: twice as many numbers as there are hops."""
    return Body(number, "float", write=_write_hops, read=_read_hops)


def _check_endpoints(endpoints: tuple[Endpoint, ...]) -> None:
    if len(endpoints) > limits.MAX_ENDPOINTS:
        raise ValueError(f"a next hop has at most {limits.MAX_ENDPOINTS} endpoints")
    for endpoint in endpoints:
        check_endpoint(endpoint)


_ENDPOINT = {
    "host": Body(1, "string"),
    "port": Body(2, "uint32"),
    "fingerprint": Body(3, "string"),
}
_check_capability = sized(CAPABILITY_BYTES, "a capability")


@dataclass(frozen=True, slots=True)
class NextHop(Record):
    """The next hop of a session: a session at another peer, and the capability for it.

    It is dialled where it has announced itself, or reached over connections that it has offered.
    The endpoints here are what the client has seen: others are a reason to look it up again.

    Outputs of steps before `first_sequence` are not pushed but answered: they are a replay, which
    the next hop has no need of.
    """

    peer_id: Annotated[PeerId, Body(1, "string"), check_text]
    endpoints: Annotated[tuple[Endpoint, ...], Body(2, parts=_ENDPOINT), _check_endpoints]
    session: Annotated[SessionId, Body(3, "bytes"), check_session]
    epoch: Annotated[int, Body(4, "uint32")]
    capability: Annotated[Capability, Body(5, "bytes"), _check_capability]
    first_sequence: Annotated[int, Body(6, "uint64")] = 0


def _check_next(following: NextHop | None, session: SessionId) -> None:
    if following is not None and following.session == session:
        raise ValueError("a session cannot be its own next hop")


@message(3)
class Open(Message):
    """Ask a peer to hold a session for some of its blocks.

    `max_tokens` bounds the session's length per row; the peer commits memory only as it grows.
    Where there is no room now, the peer declines at once, or, if `max_wait_seconds` are given,
    answers `Queued` and decides within that time. `kv_format` is how the session's keys and values
    are kept, to the end.

    With a `parent`, a session of the same client with the same span, rows and `kv_format`, the new
    one begins with the first `prefix_tokens` tokens that the peer holds of it.

    In a chain, `capability` is what the peer before has to show, and `next` where outputs go. All
    rows have the `adapter`, if there is one.

    With `prompt_tokens`, deep prompts follow in `PassPiece`s under the id of the session: that many
    for each block, which are added to its inputs at the first positions whenever these are
    computed, to each row its own (`prompt_rows` is `num_rows`) or to all rows the same (1). They
    stay with their rows where a step moves what is cached. `Opened` comes when they are here.
    """

    session: HeaderSession
    epoch: HeaderEpoch
    model_id: Annotated[ModelId, Body(1, "string"), check_model_id]
    span: Annotated[
        Span, Spread({"start": Body(2, "uint32"), "stop": Body(3, "uint32")}), check_span
    ]
    num_rows: Annotated[int, Body(4, "uint32"), count_to(limits.MAX_BATCH_ROWS, "number of rows")]
    max_tokens: Annotated[
        int, Body(5, "uint32"), count_to(limits.MAX_SESSION_TOKENS, "session length")
    ]
    dtype: Annotated[WireDtype, Body(6, "uint32")]
    max_wait_seconds: Annotated[float, Body(7, "double"), check_seconds] = 0.0
    kv_format: Annotated[KVFormat, Body(8, "uint32")] = KVFormat.FLOAT
    parent: Annotated[SessionId | None, Body(9, "bytes"), check_session] = None
    prefix_tokens: Annotated[int, Body(10, "uint32")] = 0
    capability: Annotated[
        Capability, Body(11, "bytes"), sized_or_none(CAPABILITY_BYTES, "a capability")
    ] = NO_CAPABILITY
    next: Annotated[NextHop | None, Body(12)] = None
    adapter: Annotated[AdapterId, Body(13, "bytes"), check_adapter] = NO_ADAPTER
    prompt_rows: Annotated[int, Body(15, "uint32")] = 0
    prompt_tokens: Annotated[int, Body(14, "uint32")] = 0

    def check(self) -> None:
        """Raise ValueError unless parent, deep prompts and next hop fit the session."""
        if self.parent is not None:
            if self.parent == self.session:
                raise ValueError("a session cannot be its own parent")
            check_count(self.prefix_tokens, self.max_tokens, "prefix length")
        elif self.prefix_tokens:
            raise ValueError("a prefix has a parent")
        rows, tokens = self.prompt_rows, self.prompt_tokens
        if (rows, tokens) != (0, 0):
            if rows not in (1, self.num_rows):
                raise ValueError(f"{rows} rows of deep prompts do not fit {self.num_rows} rows")
            check_count(tokens, self.max_tokens, "length of deep prompts")
            num_prompts = len(self.span) * rows * tokens
            check_count(num_prompts, limits.MAX_PASS_PROMPTS, "number of deep prompts")
        _check_next(self.next, self.session)


@message(10)
class Queued(Message):
    """The session has to wait for room, about this long; `Opened` or `Declined` follows."""

    session: HeaderSession
    epoch: HeaderEpoch
    wait_seconds: Annotated[float, Body(1, "double"), check_seconds]


@message(4)
class Opened(Message):
    """The session is held; what the peer's load looks like at this moment."""

    session: HeaderSession
    epoch: HeaderEpoch
    queue_seconds: Annotated[float, Body(1, "float"), check_seconds]
    free_kv_tokens: Annotated[int, Body(2, "uint64")]


@message(5)
class Step(Message):
    """Hidden states of the next tokens of a session.

    `row_map[i]` names the row whose cached prefix row i continues (beam search); None keeps the
    rows as they are. `is_decoded` says that these tokens were generated one by one, so a peer
    that rebuilds a cache computes them the way it would have then. With `last_token_only` the
    answer holds only the last token of each row. Of a step cut in several, each `is_piece`: they
    stay on one stream, so that none overtakes another. A pushed step brings the times of the hops
    `before`.
    """

    session: HeaderSession
    epoch: HeaderEpoch
    sequence: HeaderSequence
    position: _HeaderPosition
    hidden: _HeaderTensor
    row_map: Annotated[tuple[int, ...] | None, Body(1, "uint32")] = None
    is_decoded: Annotated[bool, Flag(2)] = False
    last_token_only: Annotated[bool, Flag(1)] = False
    is_piece: Annotated[bool, Flag(4)] = False
    before: Annotated[tuple[HopSeconds, ...], _locate_hops(2), _check_hops] = ()

    def check(self) -> None:
        """Raise ValueError unless the row map names rows, as many as there are."""
        num_rows, row_map = self.hidden.rows, self.row_map
        if row_map is not None and (
            len(row_map) != num_rows or not all(0 <= row < num_rows for row in row_map)
        ):
            raise ValueError(f"the row map does not fit {num_rows} rows")


BULK_FRAME_BYTES = 256 * 2**10
"""Larger steps go over the second connection, so that they never delay a token."""


class Lane(Enum):
    """Which of two streams to a peer a frame takes, so that a prompt never delays a token."""

    INTERACTIVE = "interactive"
    BULK = "bulk"


def choose_lane(step: Step, num_bytes: int) -> Lane:
    """Return the lane of a step that is a frame of so many bytes; pieces of one share a lane."""
    is_bulk = step.is_piece or num_bytes > BULK_FRAME_BYTES
    return Lane.BULK if is_bulk else Lane.INTERACTIVE


@message(6)
class Output(Message):
    """The output of a step, and how long the step waited and computed, here and `before`."""

    session: HeaderSession
    epoch: HeaderEpoch
    sequence: HeaderSequence
    position: _HeaderPosition
    hidden: _HeaderTensor
    queue_seconds: Annotated[float, Body(1, "float"), check_seconds] = 0.0
    compute_seconds: Annotated[float, Body(2, "float"), check_seconds] = 0.0
    before: Annotated[tuple[HopSeconds, ...], _locate_hops(3), _check_hops] = ()


@message(7)
class Gap(Message):
    """A step began beyond the end of the peer's cache; `length` is where it ends. Nothing
    changed.
    """

    session: HeaderSession
    epoch: HeaderEpoch
    sequence: HeaderSequence
    length: _HeaderPosition


@message(8)
class Close(Message):
    """The client is done with a session; its cache is freed. There is no answer."""

    session: HeaderSession
    epoch: HeaderEpoch


@message(9)
class Declined(Message):
    """A typed refusal. `sequence` is the refused step's, or 0 when it was not a step.

    `session` is None when the whole stream is meant; the sender closes it then. It may be a pass
    as well.
    """

    session: Annotated[SessionId | None, Header("session"), check_session]
    sequence: HeaderSequence
    code: Annotated[ErrorCode, Body(1, "uint32")]
    detail: Annotated[str, Body(2, "string", write=clean_text)]
    retry_after_seconds: Annotated[float | None, Body(3, "float"), check_seconds] = None

    COMPUTED = {"whole_stream": Body(4, "bool")}  # noqa: RUF012

    @property
    def whole_stream(self) -> bool:
        """Whether it speaks of no session."""
        return self.session is None

    def make_error(self, name: str, session: SessionId | None) -> ShoalError:
        """Return the error that it stands for at this end, which names the peer that refused;
        RemoteProtocolError where that refuses another session than this one.
        """
        if self.session not in (None, session):
            return RemoteProtocolError(f"{name} refused a session that it was not asked for")
        detail = f"{name} refused: {self.detail}"
        if self.code is ErrorCode.CACHE_FULL:
            return CacheFullError(detail, self.retry_after_seconds)
        return RefusedError(self.code, detail, self.retry_after_seconds)

    @classmethod
    def read(cls, fields: dict[str, Any]) -> Self:
        """Return the refusal; raises ValueError for one of a session and of the whole stream."""
        if fields.pop("whole_stream"):
            if fields["session"] != NO_SESSION:
                raise ValueError("it speaks of one session and of the whole stream")
            fields["session"] = None
        check_text(fields["detail"])
        return cls(**fields)


@message(16)
class Leaving(Message):
    """The peer will stop soon, and serves until then: the client should move the session."""

    session: HeaderSession
    epoch: HeaderEpoch


@message(14)
class Probe(Message):
    """Ask how far a session is; a live peer answers at once with a `Status`."""

    session: HeaderSession
    epoch: HeaderEpoch


@message(15)
class Status(Message):
    """How far a session is: the newest step that was taken, the newest that is done, its length,
    and of how many steps the replay consists that a `Redirect` or `Mirror` has set off.
    """

    session: HeaderSession
    epoch: HeaderEpoch
    sequence: HeaderSequence
    length: _HeaderPosition
    done_sequence: Annotated[int, Body(1, "uint64")] = 0
    num_replayed: Annotated[int, Body(2, "uint32")] = 0


@message(11)
class Attach(Message):
    """A peer is about to push steps of a session on this stream. Only a refusal is answered."""

    session: HeaderSession
    epoch: HeaderEpoch
    capability: Annotated[Capability, Body(1, "bytes"), _check_capability]


@message(12)
class Admit(Message):
    """From now on take steps of this epoch only, from peers that show this capability. The answer
    is a `Status`.
    """

    session: HeaderSession
    epoch: HeaderEpoch
    capability: Annotated[Capability, Body(1, "bytes"), _check_capability]


@message(13)
class Redirect(Message):
    """Push outputs somewhere else from now on, or (None) answer with them. The answer is a
    `Status`.

    What was pushed before is sent again from the log: up to `resume_sequence` as a replay of what
    is left of it, which is for a new hop only, and from there on as it was. Where that step is yet
    to come, nothing is sent again to a session that is pushed to already, or was mirrored.
    """

    session: HeaderSession
    epoch: HeaderEpoch
    resume_sequence: HeaderSequence
    next: Annotated[NextHop | None, Body(1)] = None

    def check(self) -> None:
        """Raise ValueError for a session that is to push to itself."""
        _check_next(self.next, self.session)


@message(17)
class Mirror(Message):
    """Push outputs to a new hop as well, which is to take the place of the next one: first a
    replay of what was pushed so far. The answer is a `Status`.

    Nothing is replayed (`num_replayed` is 0) where that is not possible. Whatever becomes of the
    new hop, outputs go on to the next one, until a `Redirect` comes.
    """

    session: HeaderSession
    epoch: HeaderEpoch
    next: Annotated[NextHop, Body(1)]

    def check(self) -> None:
        """Raise ValueError for a session that is to push to itself."""
        _check_next(self.next, self.session)
