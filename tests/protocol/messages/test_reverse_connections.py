"""Offers of streams: whoever did not make one for this very stream gets nowhere with it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.protocol.errors import RemoteProtocolError
from shoal.protocol.identity import Identity
from shoal.protocol.ids import PeerId
from shoal.protocol.messages.reverse_connections import Offer, check_offer, make_offer

HOME, OTHER = Identity(bytes([1]) * 32), Identity(bytes([2]) * 32)
FINGERPRINT, NONCE = "a" * 64, bytes(range(32))


def make(is_bulk: bool = False) -> Offer:
    return make_offer(HOME, FINGERPRINT, NONCE, is_bulk)


@pytest.mark.parametrize("is_bulk", [False, True])
def test_offer_for_this_stream_is_taken(is_bulk: bool) -> None:
    check_offer(make(is_bulk), FINGERPRINT, NONCE)


@pytest.mark.parametrize(
    "forged",
    [
        replace(make(), peer_id=OTHER.peer_id),
        replace(make(), peer_id=PeerId("nobody")),
        replace(make(), peer_id=PeerId("")),
        replace(make(), is_bulk=True),
        replace(make(), signature=bytes(64)),
        replace(make(), signature=OTHER.sign(NONCE)),
        replace(make_offer(OTHER, FINGERPRINT, NONCE, False), peer_id=HOME.peer_id),
    ],
)
def test_forged_offer_is_refused(forged: Offer) -> None:
    with pytest.raises(RemoteProtocolError, match="not made for this stream"):
        check_offer(forged, FINGERPRINT, NONCE)


def test_offer_is_worth_nothing_on_another_stream() -> None:
    with pytest.raises(RemoteProtocolError):
        check_offer(make(), FINGERPRINT, bytes(32))


def test_offer_is_worth_nothing_at_another_peer_that_says_the_same_nonce() -> None:
    """So a peer that is offered a stream cannot pass it on as its own."""
    with pytest.raises(RemoteProtocolError):
        check_offer(make(), "b" * 64, NONCE)
