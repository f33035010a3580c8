"""What proves that a stream leads to a peer: it has dialled itself, so no address says who it is.

A signature holds for one stream (the nonce), for the one who takes it (the fingerprint of his TLS
key, which the offering peer has checked) and for one lane. So whoever hears it can offer nothing
with it: not there again, not on another connection, and not to anybody else.
"""

from ..errors import RemoteProtocolError
from ..identity import Identity, verify
from .session import Offer

_CONTEXT = b"shoal offer 1\0"


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
    lane = b"bulk" if is_bulk else b"interactive"
    return b"\0".join((_CONTEXT + fingerprint.encode(), lane, nonce))
