"""The parts of messages that only chains need, as protobuf and back: see `wire` for the rest."""

from collections.abc import Sequence

from ..endpoints import Endpoint
from ..ids import Capability, PeerId, SessionId
from ..messages.session import Admit, Attach, HopSeconds, Mirror, NextHop, Redirect, Status
from ..proto import wire_pb2 as pb
from .frames import Kind, Parts


def encode_next(following: NextHop | None) -> pb.NextHopBody | None:
    """Return the protobuf part of a next hop; None says that there is none."""
    if following is None:
        return None
    endpoints = [
        pb.EndpointBody(host=known.host, port=known.port, fingerprint=known.fingerprint)
        for known in following.endpoints
    ]
    return pb.NextHopBody(
        peer_id=following.peer_id,
        endpoints=endpoints,
        session=following.session,
        epoch=following.epoch,
        capability=following.capability,
        first_sequence=following.first_sequence,
    )


def decode_next(body: pb.NextHopBody) -> NextHop:
    """Return the next hop that a stranger wrote; `message_checks` says whether it can be one."""
    return NextHop(
        PeerId(body.peer_id),
        tuple(Endpoint(given.host, given.port, given.fingerprint) for given in body.endpoints),
        SessionId(body.session),
        body.epoch,
        Capability(body.capability),
        body.first_sequence,
    )


def encode_before(before: Sequence[HopSeconds]) -> list[float]:
    """Return the times of hops one behind the other.

    >>> encode_before([HopSeconds(0.5, 0.25)])
    [0.5, 0.25]
    """
    return [seconds for hop in before for seconds in hop]


def decode_before(seconds: Sequence[float]) -> tuple[HopSeconds, ...]:
    """Return the times hop by hop; raises ValueError when half a hop is left over."""
    if len(seconds) % 2:
        raise ValueError("a hop has two times")
    return tuple(map(HopSeconds, seconds[::2], seconds[1::2]))


def encode_status(message: Status) -> Parts:
    """Return the fields of the frame."""
    body = pb.StatusBody(done_sequence=message.done_sequence, num_replayed=message.num_replayed)
    return Parts(
        Kind.STATUS, message.session, message.epoch, message.sequence, message.length,
        control=body.SerializeToString(),
    )  # fmt: skip


def decode_status(parts: Parts) -> Status:
    """Return how far a session is; raises protobuf's DecodeError."""
    body = pb.StatusBody()
    body.ParseFromString(bytes(parts.control))
    return Status(
        SessionId(parts.session),
        parts.epoch,
        parts.sequence,
        parts.position,
        body.done_sequence,
        body.num_replayed,
    )


def encode_capability(message: Attach | Admit) -> Parts:
    """Return the fields of the frame."""
    kind = Kind.ATTACH if isinstance(message, Attach) else Kind.ADMIT
    body = pb.CapabilityBody(capability=message.capability)
    return Parts(kind, message.session, message.epoch, control=body.SerializeToString())


def decode_attach(parts: Parts) -> Attach:
    """Return who is about to push; like all below it raises protobuf's DecodeError."""
    body = pb.CapabilityBody()
    body.ParseFromString(bytes(parts.control))
    return Attach(SessionId(parts.session), parts.epoch, Capability(body.capability))


def decode_admit(parts: Parts) -> Admit:
    """Return whose steps are to be taken."""
    body = pb.CapabilityBody()
    body.ParseFromString(bytes(parts.control))
    return Admit(SessionId(parts.session), parts.epoch, Capability(body.capability))


def encode_redirect(message: Redirect) -> Parts:
    """Return the fields of the frame."""
    body = pb.RedirectBody(next=encode_next(message.next))
    return Parts(
        Kind.REDIRECT, message.session, message.epoch, message.resume_sequence,
        control=body.SerializeToString(),
    )  # fmt: skip


def decode_redirect(parts: Parts) -> Redirect:
    """Return where outputs are to go."""
    body = pb.RedirectBody()
    body.ParseFromString(bytes(parts.control))
    following = decode_next(body.next) if body.HasField("next") else None
    return Redirect(SessionId(parts.session), parts.epoch, parts.sequence, following)


def encode_mirror(message: Mirror) -> Parts:
    """Return the fields of the frame."""
    body = pb.RedirectBody(next=encode_next(message.next))
    return Parts(Kind.MIRROR, message.session, message.epoch, control=body.SerializeToString())


def decode_mirror(parts: Parts) -> Mirror:
    """Return where outputs are to go as well."""
    body = pb.RedirectBody()
    body.ParseFromString(bytes(parts.control))
    return Mirror(SessionId(parts.session), parts.epoch, decode_next(body.next))
