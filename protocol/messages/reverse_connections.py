"""Reverse connections: a peer that cannot be dialled offers a stream to be reached by.

It says `Offer` behind its `Hello`. When the stream is `Parked` it waits: the other one dials by
saying `Hello` on it, now or in hours.

Such a peer has dialled itself, so a signature proves who it is, and no address. It holds for one
stream (the nonce), for the peer that takes it (the fingerprint of its TLS key, which the offering
peer has checked) and for one kind of frames. So a peer that hears it can offer nothing with it: not
there again, not on another connection, and not to anybody else.
"""

from typing import Annotated

from ..errors import RemoteProtocolError
from ..identity import SIGNATURE_BYTES, Identity, verify
from ..ids import PeerId
from .fields import (
    Body,
    Message,
    check_text,
    message,
    sized,
)

_CONTEXT = b"shoal offer 1\0"


@message(18)
class Offer(Message):
    """A peer that cannot be dialled lets the other end use this stream to reach it. The answer is
    `Parked`.

    Nothing else is said on the stream. `signature` shows that it is that peer, see `make_offer`;
    `is_bulk` says for which frames the stream is.
    """

    peer_id: Annotated[PeerId, Body(1, "string"), check_text]
    is_bulk: Annotated[bool, Body(2, "bool")]
    signature: Annotated[bytes, Body(3, "bytes"), sized(SIGNATURE_BYTES, "a signature")]


@message(19)
class Parked(Message):
    """The stream is kept. If it is needed, `Hello` follows, and the offering peer answers."""


def make_offer(identity: Identity, fingerprint: str, nonce: bytes, is_bulk: bool) -> Offer:
    """Return our offer to the peer with this TLS key, which said this nonce in its Welcome."""
    signature = identity.sign(_make_signed(fingerprint, nonce, is_bulk))
    return Offer(identity.peer_id, is_bulk, signature)


def check_offer(offer: Offer, fingerprint: str, nonce: bytes) -> None:
    """Raise RemoteProtocolError unless the peer that is named made the offer for this stream.

    `fingerprint` is that of our own TLS key, `nonce` what we said in our Welcome.
    """
    if not verify(offer.peer_id, _make_signed(fingerprint, nonce, offer.is_bulk), offer.signature):
        raise RemoteProtocolError("the offer was not made for this stream by the peer it names")


def _make_signed(fingerprint: str, nonce: bytes, is_bulk: bool) -> bytes:
    frames = b"bulk" if is_bulk else b"interactive"
    return b"\0".join((_CONTEXT + fingerprint.encode(), frames, nonce))
