"""The first words of a stream at the peer that is dialled: Hello, and what may be offered then."""

import secrets
from typing import TYPE_CHECKING

from ...protocol.errors import ErrorCode, RefusedError, RemoteProtocolError
from ...protocol.ids import OFFER_NONCE_BYTES
from ...protocol.messages.offers import Offer
from ...protocol.messages.session import Hello, Welcome
from ...protocol.versions import OPTIMIZER_VERSION, REVERSE_VERSION, SOFTWARE, agree_on_version

if TYPE_CHECKING:
    from .service import Service


class Greeting:
    """Which version one stream speaks, once Hello was said, and who has offered the stream."""

    def __init__(self, service: "Service") -> None:
        self.version = 0
        self.offer: Offer | None = None
        self._service = service
        self._nonce = b""

    @property
    def is_done(self) -> bool:
        """Whether Hello was said."""
        return self.version > 0

    def understands_signs(self) -> bool:
        """Return whether the other end expects to hear that what it asked for takes a while."""
        return self.version >= OPTIMIZER_VERSION

    def check_is_done(self) -> None:
        """Raise RefusedError unless Hello was said."""
        if not self.is_done:
            raise RefusedError(ErrorCode.BAD_FRAME, "the first message of a stream is Hello")

    def welcome(self, hello: Hello) -> Welcome:
        """Return the answer. Raises RefusedError where no version fits."""
        if self.is_done:  # bytes count under the first name, and time passes
            raise RemoteProtocolError("Hello is said once")
        self.version = agree_on_version(hello.min_version, hello.max_version)
        service = self._service
        if self.version >= REVERSE_VERSION and service.parked is not None:
            self._nonce = secrets.token_bytes(OFFER_NONCE_BYTES)
        facts, span, wall = service.facts, service.engine.span, service.clock.wall()
        return Welcome(
            self.version, SOFTWARE, facts.peer_id, facts.model_id, span, wall, self._nonce
        )

    def take_offer(self, offer: Offer) -> None:
        """Note that the other end offers the stream. Raises RemoteProtocolError unless that was
        asked for, and it is who it says it is.
        """
        parked = self._service.parked
        if parked is None or not self._nonce:
            raise RemoteProtocolError("no offers are taken on this stream")
        parked.check(offer, self._nonce)
        self.offer = offer
