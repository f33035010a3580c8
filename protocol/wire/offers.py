"""The messages of reverse connections, as parts of frames and back: see `wire` for the rest."""

from ..ids import PeerId
from ..messages.session import Offer, Parked
from ..proto import wire_pb2 as pb
from .frames import Kind, Parts


def encode_offer(message: Offer) -> Parts:
    """Return the parts of an offer."""
    body = pb.OfferBody(
        peer_id=message.peer_id, is_bulk=message.is_bulk, signature=message.signature
    )
    return Parts(Kind.OFFER, control=body.SerializeToString())


def decode_offer(parts: Parts) -> Offer:
    """Return the offer that a stranger wrote; `offers` says whether it is his."""
    body = pb.OfferBody()
    body.ParseFromString(bytes(parts.control))
    return Offer(PeerId(body.peer_id), body.is_bulk, body.signature)


def encode_parked(_message: Parked) -> Parts:
    """Return the parts of the answer to an offer, in which there is nothing."""
    return Parts(Kind.PARKED)


def decode_parked(_parts: Parts) -> Parked:
    """Return the answer to an offer."""
    return Parked()
