"""Every message that peers and clients exchange, as plain values.

A conversation on one stream: the dialler says `Hello`, the peer answers `Welcome`. For each
session the client sends `Open` and gets `Opened`, perhaps `Queued` before, then `Step` and gets
`Output` (or `Gap`), then `Close`. Anything can be answered by `Declined`.

In a chain a peer pushes its outputs to the next one, as `Step` behind an `Attach`, and only the
last peer answers the client, which keeps a stream to each for `Admit`, `Redirect`, `Mirror` and
`Probe`. A peer that is about to stop says `Leaving` to the client of every session.

A peer that cannot be dialled says `Offer` behind its `Hello`. When the stream is `Parked` it waits:
the other one dials by saying `Hello` on it, now or in hours.

Fine-tuning needs no session. On a stream of its own the client says `Pass` and sends tensors in
`PassPiece`s; those of the answer come in the same way, and `Passed` ends them. An adapter that
passes and sessions name is brought before, as `AdapterHead` and `AdapterPiece`s, and `AdapterKept`.
A peer that trains one itself is told when, by `AdapterMeasure` and `AdapterUpdate`. Whoever has
published one takes it back with `AdapterWithdrawal`.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from ..errors import ErrorCode
from ..ids import (
    NO_ADAPTER,
    NO_CAPABILITY,
    NO_CLIENT,
    AdapterId,
    Capability,
    ClientToken,
    ModelId,
    PassId,
    PeerId,
    SessionId,
)
from ..spans import Span
from ..tensors import KVFormat, WireDtype, WireTensor
from .adapters import (
    AdapterFetch,
    AdapterHead,
    AdapterKept,
    AdapterMeasure,
    AdapterMeasured,
    AdapterPiece,
    AdapterRows,
    AdapterUpdate,
    AdapterWithdrawal,
    GatherOrder,
)
from .chain import Admit, Attach, Mirror, NextHop, Redirect


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of the dialler: which protocol versions it speaks.

    Streams and sessions of one `client` are counted together; who gives none is counted with all
    the others of its address that do not.
    """

    min_version: int
    max_version: int
    software: str
    client: ClientToken = NO_CLIENT


@dataclass(frozen=True, slots=True)
class Welcome:
    """The peer's answer: the version to speak, who it is, what it serves, and its clock.

    The `nonce`, made for this stream, is for an `Offer` to sign; a peer that takes none has none.
    """

    version: int
    software: str
    peer_id: PeerId
    model_id: ModelId
    span: Span
    wall_seconds: float
    nonce: bytes = b""


class HopSeconds(NamedTuple):
    """How long a step waited and was computed at one hop."""

    queue: float
    compute: float


@dataclass(frozen=True, slots=True)
class Open:
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

    session: SessionId
    epoch: int
    model_id: ModelId
    span: Span
    num_rows: int
    max_tokens: int
    dtype: WireDtype
    max_wait_seconds: float = 0.0
    kv_format: KVFormat = KVFormat.FLOAT
    parent: SessionId | None = None
    prefix_tokens: int = 0
    capability: Capability = NO_CAPABILITY
    next: NextHop | None = None
    adapter: AdapterId = NO_ADAPTER
    prompt_rows: int = 0
    prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Queued:
    """The session has to wait for room, about this long; `Opened` or `Declined` follows."""

    session: SessionId
    epoch: int
    wait_seconds: float


@dataclass(frozen=True, slots=True)
class Opened:
    """The session is held; what the peer's load looks like at this moment."""

    session: SessionId
    epoch: int
    queue_seconds: float
    free_kv_tokens: int


@dataclass(frozen=True, slots=True)
class Step:
    """Hidden states of the next tokens of a session.

    `row_map[i]` names the row whose cached prefix row i continues (beam search); None keeps the
    rows as they are. `is_decoded` says that these tokens were generated one by one, so a peer
    that rebuilds a cache computes them the way it would have then. With `last_token_only` the
    answer holds only the last token of each row. Of a step cut in several, each `is_piece`: they
    stay on one lane, so that none overtakes another. A pushed step brings the times of the hops
    `before`.
    """

    session: SessionId
    epoch: int
    sequence: int
    position: int
    hidden: WireTensor
    row_map: tuple[int, ...] | None = None
    is_decoded: bool = False
    last_token_only: bool = False
    is_piece: bool = False
    before: tuple[HopSeconds, ...] = ()


@dataclass(frozen=True, slots=True)
class Output:
    """What the span made of a step, and how long it waited and computed, here and `before`."""

    session: SessionId
    epoch: int
    sequence: int
    position: int
    hidden: WireTensor
    queue_seconds: float = 0.0
    compute_seconds: float = 0.0
    before: tuple[HopSeconds, ...] = ()


@dataclass(frozen=True, slots=True)
class Gap:
    """A step began beyond the end of the peer's cache; `length` is where it ends. Nothing
    changed.
    """

    session: SessionId
    epoch: int
    sequence: int
    length: int


@dataclass(frozen=True, slots=True)
class Close:
    """The client is done with a session; its cache is freed. There is no answer."""

    session: SessionId
    epoch: int


@dataclass(frozen=True, slots=True)
class Declined:
    """A typed refusal. `sequence` is the refused step's, or 0 when it was not a step.

    `session` is None when the whole stream is meant; the sender closes it then. It may be a pass
    as well.
    """

    session: SessionId | None
    sequence: int
    code: ErrorCode
    detail: str
    retry_after_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Leaving:
    """The peer will stop soon, and serves until then: the client should move the session."""

    session: SessionId
    epoch: int


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask how far a session is; answered at once with a `Status`, by whoever lives."""

    session: SessionId
    epoch: int


@dataclass(frozen=True, slots=True)
class Status:
    """How far a session is: the newest step that was taken, the newest that is done, its length,
    and of how many steps the replay consists that a `Redirect` or `Mirror` has set off.
    """

    session: SessionId
    epoch: int
    sequence: int
    length: int
    done_sequence: int = 0
    num_replayed: int = 0


@dataclass(frozen=True, slots=True)
class Offer:
    """A peer that cannot be dialled lets the other end use this stream to reach it. The answer is
    `Parked`.

    Nothing else is said on the stream. `signature` shows that it is that peer, see `offers`;
    `is_bulk` is the lane.
    """

    peer_id: PeerId
    is_bulk: bool
    signature: bytes


@dataclass(frozen=True, slots=True)
class Parked:
    """The stream is kept. If it is needed, `Hello` follows, and who offered it answers."""


class PassKind(IntEnum):
    """Which way a pass goes through the blocks."""

    FORWARD = 1
    BACKWARD = 2


class Slot(IntEnum):
    """Which tensor of a pass a piece belongs to: vectors of size H, for all rows in turn."""

    HIDDEN = 1
    """The inputs; in the answer the outputs, or the gradients of the inputs."""

    GRADIENTS = 2
    """The gradients of the outputs."""

    PROMPTS = 3
    """The deep prompts of all blocks; in the answer their gradients."""

    ADAPTERS = 4
    """In the answer the gradients of adapters, one number after the other, see `passes`."""


@dataclass(frozen=True, slots=True)
class Pass:
    """Ask for one pass of a microbatch through some blocks, from position 0 on and without a cache.

    The pieces of its tensors follow, slot by slot. Backward, the peer computes the outputs once
    more: it remembers nothing of the pass forward. Deep prompts are added to the first
    `prompt_tokens` inputs of their block, to each row its own (`prompt_rows` is `num_rows`) or to
    all the same (1). The answer is in `dtype`.

    `adapters` says which rows have which adapter; without, none has one. Backward,
    `adapter_vectors` are those that the gradients of all of them fill; 0: they are not wanted.
    To `gather` them, of the one adapter that rows have, is for one that the peer trains. Forward,
    `trains_adapters` says that any of this will be asked for: a peer without memory for it declines
    before it computes anything.
    """

    pass_id: PassId
    kind: PassKind
    model_id: ModelId
    span: Span
    num_rows: int
    num_tokens: int
    dtype: WireDtype
    prompt_rows: int = 0
    prompt_tokens: int = 0
    adapters: tuple[AdapterRows, ...] = ()
    adapter_vectors: int = 0
    gather: GatherOrder | None = None
    trains_adapters: bool = False


@dataclass(frozen=True, slots=True)
class PassPiece:
    """Some vectors of one tensor of a pass, `[1, vectors, H]`, from the one at `offset` on."""

    pass_id: PassId
    slot: Slot
    offset: int
    tensor: WireTensor


@dataclass(frozen=True, slots=True)
class Passed:
    """The end of the answer to a pass, and how long the pass waited and computed."""

    pass_id: PassId
    queue_seconds: float
    compute_seconds: float


Message = (
    Hello
    | Welcome
    | Open
    | Queued
    | Opened
    | Step
    | Output
    | Gap
    | Close
    | Declined
    | Attach
    | Admit
    | Redirect
    | Probe
    | Status
    | Leaving
    | Mirror
    | Offer
    | Parked
    | Pass
    | PassPiece
    | Passed
    | AdapterHead
    | AdapterPiece
    | AdapterKept
    | AdapterMeasure
    | AdapterMeasured
    | AdapterUpdate
    | AdapterFetch
    | AdapterWithdrawal
)
