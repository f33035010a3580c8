"""A stranger with ten identities of his own, who attacks the swarm while it is in trouble.

One process, for which chaos is `Stranger`. He is in the directory of the swarm like anybody else,
and dials peers past their proxies, from an address of his own. The seed decides what he does; his
strokes are short and have pauses between, so that a swarm on two cores has time for its work.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path
from random import Random
from secrets import token_bytes
from typing import Any

from announcements import describe_peer
from chaos.links import PEER_HOST, PROXY_HOST, STRANGER_HOST

from shoal.peer.local_swarm.swarm import LocalPeer, PeerProcessError
from shoal.protocol.endpoints import Endpoint
from shoal.protocol.errors import ErrorCode, ShoalError
from shoal.protocol.identity import Identity
from shoal.protocol.ids import ModelId
from shoal.protocol.messages.codec import decode_frame, encode_frame
from shoal.protocol.messages.fields import Message
from shoal.protocol.messages.records import RecordFetch, Records
from shoal.protocol.messages.session import Declined, Hello, Open, Opened, Step, Welcome
from shoal.protocol.net.clock import SystemClock
from shoal.protocol.net.dht.hivemind_directory import HivemindDirectory
from shoal.protocol.net.tcp.tcp_transport import TcpTransport
from shoal.protocol.net.transport import Stream
from shoal.protocol.records.announcements import Announcement, sign_announcement
from shoal.protocol.spans import Span
from shoal.protocol.versions import MAX_VERSION
from swarm_benchmarks.attacker import ATTACKS, Raid

NUM_IDENTITIES = 10

_FOLDERS = (Path(__file__).parents[1], Path(__file__).parents[3] / "benchmarks")
_GAP_SECONDS = (0.2, 1.0)
_STROKE_SECONDS = 0.2
_NUM_THREADS = 4
"""Of one stroke."""

_NUM_FORGED = 30
"""Records of one flood."""

_LIFETIME_SECONDS = 20.0
_LEAVE_SECONDS = 20.0

_CLOCK = SystemClock()


class Stranger:
    """His process, for use in a `with` block."""

    def __init__(self, seed: int, model_id: ModelId, num_blocks: int, peers: Sequence[str]) -> None:
        self._command = [sys.executable, "-P", "-m", "chaos.stranger", str(seed), model_id]
        self._command += [str(num_blocks), *peers]

    def __enter__(self) -> Stranger:
        self._process = LocalPeer.Popen(
            self._command,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, _FOLDERS))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,
        )
        return self

    def __exit__(self, *exception: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()

    def leave(self) -> Counter[str]:
        """Have him leave; return how often he did what.

        Raises PeerProcessError when he does not, or has been gone already.
        """
        try:
            said, _ = self._process.communicate(timeout=_LEAVE_SECONDS)
            return Counter(json.loads(said))
        except (subprocess.TimeoutExpired, ValueError):
            raise PeerProcessError("the stranger did not attack to the end") from None


# ---- his process


class _Lie(Enum):
    """How one of his own peers receives those who dial it."""

    NOISE = "bytes that mean nothing"
    SILENCE = "nothing at all"
    OTHER_NAME = "a welcome by somebody else"
    REFUSAL = "no room, for a year"
    WRONG_ANSWERS = "holds every session, and answers steps by what is no output"


@dataclass
class _FalsePeer:
    """One of his own peers."""

    identity: Identity
    lie: _Lie
    model_id: ModelId
    span: Span
    make_up: Callable[[], tuple[bytes, ...]] = tuple
    """Makes what it tells of others."""
    num_calls: int = 0

    async def serve(self, stream: Stream) -> None:
        self.num_calls += 1
        with contextlib.suppress(ShoalError):
            while (frame := await stream.receive()) is not None:
                answer = self._answer(decode_frame(frame))
                if answer is not None:
                    await stream.send(answer)

    def _answer(self, message: Message) -> bytes | None:
        if self.lie is _Lie.SILENCE:
            return None
        if isinstance(message, Hello) and self.lie is not _Lie.NOISE:
            return encode_frame(self._make_welcome(message))
        if isinstance(message, RecordFetch):
            return encode_frame(Records(message.question, self.make_up(), has_own=True))
        if isinstance(message, Open) and self.lie is _Lie.REFUSAL:
            return encode_frame(Declined(message.session, 0, ErrorCode.BUSY, "no room", 3e7))
        if isinstance(message, Open | Step) and self.lie is _Lie.WRONG_ANSWERS:
            return encode_frame(Opened(message.session, message.epoch, 0.0, 10**6))
        return token_bytes(64)

    def _make_welcome(self, hello: Hello) -> Welcome:
        other = Identity.generate() if self.lie is _Lie.OTHER_NAME else self.identity
        version, now = hello.min_version, _CLOCK.wall()
        return Welcome(version, "a peer", other.peer_id, self.model_id, self.span, now)


_Way = tuple[str, Callable[[], Awaitable[int]]]


class _Attacks:
    """All that he does."""

    def __init__(
        self,
        rng: Random,
        model_id: ModelId,
        num_blocks: int,
        directory: HivemindDirectory,
        transport: TcpTransport,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._rng = rng
        self._model_id = model_id
        self._num_blocks = num_blocks
        self._directory = directory
        self._transport = transport
        lies, span = itertools.cycle(_Lie), Span(0, num_blocks)
        self._peers = [
            _FalsePeer(Identity(rng.randbytes(32)), next(lies), model_id, span)
            for _ in range(NUM_IDENTITIES)
        ]
        for peer in self._peers:
            peer.make_up = self._make_up
        self._endpoints: list[Endpoint] = []

    async def go_on(self, is_over: asyncio.Event) -> None:
        """Do one thing after the other until it is over."""
        for peer in self._peers:
            listener = await self._transport.listen(STRANGER_HOST, 0, peer.serve)
            self._endpoints.append(listener.endpoint)
        ways: list[_Way] = [
            ("false announcements", self._announce),
            ("forged records", self._flood),
            ("lookups", self._look_up),
            *((name, partial(self._raid, name)) for name in ATTACKS),
        ]
        deck: list[_Way] = []
        while not is_over.is_set():
            deck = deck or [*self._rng.sample(ways, len(ways)), ways[0]]
            name, act = deck.pop()
            with contextlib.suppress(ShoalError):
                self.counts[name] += await act()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._rng.uniform(*_GAP_SECONDS)):
                    await is_over.wait()
        self.counts["false peers were dialled"] = sum(peer.num_calls for peer in self._peers)

    def _sign(self, number: int) -> bytes:
        """Announce that a peer of his has blocks: where it is, where nobody or an honest one is."""
        rng, now, identity = self._rng, _CLOCK.wall(), self._peers[number].identity
        start = rng.randrange(self._num_blocks)
        own = self._endpoints[number]
        honest = [endpoint for peer in self._list_honest() for endpoint in peer.endpoints]
        announcement = describe_peer(
            peer_id=identity.peer_id,
            model_id=self._model_id,
            num_blocks=self._num_blocks,
            span=Span(start, rng.randint(start + 1, self._num_blocks)),
            endpoints=(rng.choice([own, own, replace(own, port=1), *honest[:1]]),),
            issued_at=now,
            expires_at=now + _LIFETIME_SECONDS,
            sequence=int(now * 1000),
            max_version=MAX_VERSION,
            free_kv_tokens=10**6,
            decode_steps_per_second=1e4,
            prefill_tokens_per_second=1e5,
            loaded_decode_steps_per_second=1e4,
        )
        return sign_announcement(identity, announcement)

    def _make_up(self) -> tuple[bytes, ...]:
        """Return what his peers tell of others: only of each other."""
        return tuple(self._directory.records.seal(self._sign(n)) for n in range(NUM_IDENTITIES))

    def _list_honest(self) -> list[Announcement]:
        """Return the others whom he knows, in an order of chance."""
        found = self._directory.records.list_current(self._model_id, _CLOCK.wall())
        own = {peer.identity.peer_id for peer in self._peers}
        honest = [peer for peer in found if peer.peer_id not in own and peer.endpoints]
        return self._rng.sample(honest, len(honest))

    async def _announce(self) -> int:
        for number in range(NUM_IDENTITIES):
            await self._directory.announce(self._sign(number))
        return NUM_IDENTITIES

    async def _flood(self) -> int:
        """Bring records whose signature is wrong."""
        nodes: Any = self._directory._node.records
        for _ in range(_NUM_FORGED):
            record = bytearray(self._sign(self._rng.randrange(NUM_IDENTITIES)))
            record[self._rng.randrange(len(record))] ^= 1
            await nodes.bring(self._model_id, self._directory.records.seal(bytes(record)))
        return _NUM_FORGED

    async def _look_up(self) -> int:
        await self._directory.lookup(self._model_id)
        return 1

    async def _raid(self, name: str) -> int:
        attack, num_strangers = ATTACKS[name]
        honest = self._list_honest()
        if not honest:
            return 0
        endpoint = honest[0].endpoints[0]
        host = PEER_HOST if endpoint.host == PROXY_HOST else endpoint.host
        raid = Raid((host, endpoint.port), from_host=STRANGER_HOST)
        ending = threading.Timer(_STROKE_SECONDS, raid.is_over.set)
        ending.start()
        num_threads = min(num_strangers, _NUM_THREADS)
        return await asyncio.to_thread(raid.carry_out, attack, num_threads)


async def _attack(seed: str, model_id: str, num_blocks: str, *peers: str) -> None:
    rng, model = Random(f"{seed} stranger"), ModelId(model_id)
    is_over = asyncio.Event()
    loop = asyncio.get_running_loop()

    def wait_for_end() -> None:
        sys.stdin.read()
        loop.call_soon_threadsafe(is_over.set)

    threading.Thread(target=wait_for_end, daemon=True).start()
    transport = TcpTransport()
    directory = await HivemindDirectory.join(
        peers, identity=None, clock=_CLOCK, listen_host=STRANGER_HOST
    )
    attacks = _Attacks(rng, model, int(num_blocks), directory, transport)
    try:
        await attacks.go_on(is_over)
    finally:
        await transport.close()
        await directory.close()
    print(json.dumps(attacks.counts))


if __name__ == "__main__":
    asyncio.run(_attack(*sys.argv[1:]))
