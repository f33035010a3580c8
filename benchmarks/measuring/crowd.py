"""Peers that only announce themselves and tell of each other: the rest of a large swarm."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

from shoal.client.routing.route_finder import SwarmModel
from shoal.protocol import versions
from shoal.protocol.endpoints import Endpoint
from shoal.protocol.identity import Identity
from shoal.protocol.messages.codec import check_kind, decode_frame, encode_frame
from shoal.protocol.messages.records import RecordFetch, Records
from shoal.protocol.messages.session import Welcome
from shoal.protocol.net.clock import SystemClock
from shoal.protocol.net.tcp.tcp_transport import TcpTransport
from shoal.protocol.net.tcp.tls import make_tls_identity
from shoal.protocol.net.transport import Stream
from shoal.protocol.records.announcements import Announcement, PeerState, sign_announcement
from shoal.protocol.records.coordinates import Coordinate
from shoal.protocol.records.swarm_records import SwarmRecords
from shoal.protocol.spans import Span

PERIOD_SECONDS = 30.0
"""Between announcements, as `shoal serve` has it."""

_RENEWAL_SECONDS = 0.2
_CLOCK = SystemClock()


class Crowd:
    """All other peers of one swarm. Their announcements are signed by keys of their own, and
    renewed in time.
    """

    def __init__(
        self,
        num_peers: int,
        model: SwarmModel,
        books: Sequence[SwarmRecords],
        place: Callable[[int], tuple[str, int]],
        num_spans: int = 2,
    ) -> None:
        """`books` are those of the first peers; every one has all announcements, and the first
        answers for all. `place` names the host and port of a peer. The blocks of the model are in
        so many spans, each with as many peers.
        """
        self.model = model
        self.records = books[0]
        self._books = books
        self._place = place
        ends = [model.num_blocks * end // num_spans for end in range(num_spans + 1)]
        self.spans = [Span(*ends[n % num_spans :][:2]) for n in range(num_peers)]
        """What each serves: another one is told when the peer is announced the next time."""
        self._rng = random.Random(num_peers)
        self._identities = [Identity(self._rng.randbytes(32)) for _ in range(num_peers)]
        self._tls = make_tls_identity()

    def open_transport(self, stack: AsyncExitStack) -> TcpTransport:
        """Return the transport at which all of them listen, until the stack is closed."""
        transport = TcpTransport(self._tls)
        stack.push_async_callback(transport.close)
        return transport

    async def announce_all(self, stack: AsyncExitStack) -> None:
        """Announce everybody, and again in time until the stack is closed."""
        for number in range(len(self._identities)):
            self.renew(number)
            await asyncio.sleep(0)
        renewing = asyncio.create_task(self._keep_renewing())
        stack.callback(renewing.cancel)

    async def _keep_renewing(self) -> None:
        num_peers, started_at, num_renewed = len(self._identities), _CLOCK.now(), 0
        while True:
            await asyncio.sleep(_RENEWAL_SECONDS)
            due = int((_CLOCK.now() - started_at) * num_peers / PERIOD_SECONDS)
            for number in range(num_renewed, due):
                self.renew(number % num_peers)
                await asyncio.sleep(0)
            num_renewed = due

    def renew(self, number: int) -> None:
        """Announce one peer."""
        identity, now = self._identities[number], _CLOCK.wall()
        record = sign_announcement(identity, self._describe(number, now))
        value = self.records.seal(record)
        for owner, book in enumerate(self._books):
            if owner == number:
                book.add_own(record, now)  # an answer begins with one's own
            else:
                book.take(self.model.model_id, value, now)

    def _describe(self, number: int, now: float) -> Announcement:
        """Return all that a peer tells: its speeds, three round trips and where it stands."""
        rng = self._rng
        others = rng.sample(self._identities, min(3, len(self._identities)))
        return Announcement(
            peer_id=self._identities[number].peer_id,
            model_id=self.model.model_id,
            num_blocks=self.model.num_blocks,
            span=self.spans[number],
            state=PeerState.ONLINE,
            endpoints=(Endpoint(*self._place(number), self._tls.fingerprint),),
            min_version=versions.MIN_VERSION,
            max_version=versions.MAX_VERSION,
            weights="int8",
            compute_dtype="fp32",
            sequence=int(now * 1000),
            issued_at=now,
            expires_at=now + 3 * PERIOD_SECONDS,
            free_kv_tokens=rng.randrange(10**6),
            decode_steps_per_second=100 * rng.random(),
            loaded_decode_steps_per_second=100 * rng.random(),
            prefill_tokens_per_second=1000 * rng.random(),
            queue_seconds=rng.random(),
            rtts=tuple((other.peer_id, round(rng.random(), 4)) for other in others),
            coordinate=Coordinate(*(rng.random() for _ in range(5))).rounded(),
            software=versions.SOFTWARE,
            kernels="native int8 with avx512_vnni",
        )

    async def serve(self, number: int, stream: Stream) -> None:
        """Be a peer that was dialled."""
        await stream.receive()
        welcome = Welcome(
            versions.MAX_VERSION,
            versions.SOFTWARE,
            self._identities[number].peer_id,
            self.model.model_id,
            Span(0, self.model.num_blocks),
            _CLOCK.wall(),
        )
        await stream.send(encode_frame(welcome))
        if (frame := await stream.receive()) is not None:
            fetch = check_kind(decode_frame(frame), RecordFetch, "the one that is measured")
            await stream.send(encode_frame(self.answer(number, fetch)))

    def answer(self, stranger: int, fetch: RecordFetch) -> Records:
        """Answer as the member that a stranger has asked."""
        now = _CLOCK.wall()
        return self.records.answer(f"peer {stranger}", self.model.model_id, fetch, now, self._rng)
