"""What is said about chains: where a session pushes its outputs, and who may push to it."""

from dataclasses import dataclass

from ..endpoints import Endpoint
from ..ids import Capability, PeerId, SessionId


@dataclass(frozen=True, slots=True)
class NextHop:
    """Where a peer pushes the outputs of a session: a session at another peer, and the key to it.

    Without endpoints it is reached over connections that it has offered.

    Outputs of steps before `first_sequence` are not pushed but answered: they are a replay, which
    the next hop has no need of.
    """

    peer_id: PeerId
    endpoints: tuple[Endpoint, ...]
    session: SessionId
    epoch: int
    capability: Capability
    first_sequence: int = 0


@dataclass(frozen=True, slots=True)
class Attach:
    """A peer is about to push steps of a session on this stream. Only a refusal is answered."""

    session: SessionId
    epoch: int
    capability: Capability


@dataclass(frozen=True, slots=True)
class Admit:
    """From now on take steps of this epoch only, from whoever shows this capability. The answer is
    a `Status`.
    """

    session: SessionId
    epoch: int
    capability: Capability


@dataclass(frozen=True, slots=True)
class Redirect:
    """Push outputs somewhere else from now on, or (None) answer with them. The answer is a
    `Status`.

    What was pushed before is sent again from the log: up to `resume_sequence` as a replay of what
    is left of it, which is for a new hop only, and from there on as it was. Where that step is yet
    to come, nothing is sent again to a session that is pushed to already, or was mirrored.
    """

    session: SessionId
    epoch: int
    resume_sequence: int
    next: NextHop | None = None


@dataclass(frozen=True, slots=True)
class Mirror:
    """Push outputs to a new hop as well, which is to take the place of the next one: first a
    replay of what was pushed so far. The answer is a `Status`.

    Nothing is replayed (`num_replayed` is 0) where that is not possible. Whatever becomes of the
    new hop, outputs go on to the next one, until a `Redirect` comes.
    """

    session: SessionId
    epoch: int
    next: NextHop
