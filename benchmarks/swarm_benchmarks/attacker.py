"""Attacks on a peer by strangers in a process of their own, on one core, from one address.

Written by hand over blocking sockets: our own transport finishes what it begins, and is slower. The
process keeps its core busy all the time. Each line on stdin names an attack, or nothing; it is
answered with how often the attack before was repeated.
"""

import contextlib
import functools
import json
import os
import socket
import ssl
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from secrets import token_bytes

import numpy
import safetensors.numpy

from shoal.protocol.ids import ClientToken, SessionId, UploadId, make_adapter_id
from shoal.protocol.limits import MAX_FRAME_BYTES
from shoal.protocol.messages.adapters import (
    DOWN,
    MAX_RANK,
    PREFIX,
    UP,
    AdapterHead,
    LoraConfig,
    cut_adapter,
)
from shoal.protocol.messages.codec import decode_frame, encode_frame
from shoal.protocol.messages.fields import Message
from shoal.protocol.messages.records import DIGEST_BYTES, MAX_NAMED_RECORDS, RecordFetch
from shoal.protocol.messages.session import Close, Hello, Open, Probe, Welcome
from shoal.protocol.net.frame_stream import LENGTH, Framing
from shoal.protocol.net.tcp.tcp_listener import HELLO
from shoal.protocol.net.tcp.tls import make_client_context
from shoal.protocol.tensors import WireDtype
from shoal.protocol.versions import MAX_VERSION, MIN_VERSION

_FROM_HOST = "127.0.0.2"
"""Not that of the peer's other clients, which would share what it may have."""

_SOCKET_SECONDS = 1.0
"""How long a stranger waits for the peer before he tries something else."""

_BURST_BYTES = 2**18
_SIZES = (2**14, 2**18, 2**20, MAX_FRAME_BYTES)
_NOBODYS = SessionId(b"x" * 16)
_KNOWN = token_bytes(DIGEST_BYTES * MAX_NAMED_RECORDS)


def _pack(frame: bytes) -> bytes:
    return b"".join(Framing().pack(frame))


_HELLO = Hello(MIN_VERSION, MAX_VERSION, "a stranger", ClientToken(b"x" * 16))


def _repeat(frame: bytes) -> bytes:
    return _pack(frame) * (_BURST_BYTES // len(frame))


@dataclass
class Raid:
    """One attack that goes on, and its strangers, who come from one address."""

    address: tuple[str, int]
    is_over: threading.Event = field(default_factory=threading.Event)
    from_host: str = _FROM_HOST
    counts: list[int] = field(default_factory=list[int])

    def carry_out(self, attack: Callable[["Raid"], None], num_strangers: int) -> int:
        """Have some strangers repeat an attack until it is over; return how often they did."""
        self.counts = [0] * num_strangers
        threads = [
            threading.Thread(target=self._repeat, args=(attack, number))
            for number in range(num_strangers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(self.counts)

    def _repeat(self, attack: Callable[["Raid"], None], number: int) -> None:
        while not self.is_over.is_set():
            with contextlib.suppress(OSError):
                attack(self)
            self.counts[number] += 1

    @contextlib.contextmanager
    def connect(self) -> Iterator[socket.socket]:
        """Open a TCP connection."""
        with socket.create_connection(
            self.address, timeout=_SOCKET_SECONDS, source_address=(self.from_host, 0)
        ) as connected:
            yield connected

    @contextlib.contextmanager
    def greet(self) -> Iterator[ssl.SSLSocket]:
        """Open a stream that may be asked."""
        with self.connect() as connected, _CONTEXT.wrap_socket(connected) as secured:
            secured.sendall(_pack(HELLO))
            secured.recv(LENGTH.size + len(HELLO))
            secured.sendall(_pack(encode_frame(_HELLO)))
            yield secured


_CONTEXT = make_client_context()


def send_tiny_frames(raid: Raid) -> None:
    """Close sessions that were never opened: nothing is answered."""
    burst = _repeat(encode_frame(Close(_NOBODYS, 1)))
    with raid.greet() as stream:
        while not raid.is_over.is_set():
            stream.sendall(burst)


def ask_small_questions(raid: Raid) -> None:
    """Ask how far sessions are that were never opened, and read the answers."""
    burst = _repeat(encode_frame(Probe(_NOBODYS, 1)))[:8192]
    with raid.greet() as stream:
        while not raid.is_over.is_set():
            stream.sendall(burst)
            stream.recv(2**16)


def ask_for_records(raid: Raid) -> None:
    """Ask for announcements, and name as many as may be named: once on each stream."""
    question = RecordFetch(SessionId(token_bytes(16)), b"", _KNOWN, 48 * 2**10)
    with raid.greet() as stream:
        stream.sendall(_pack(encode_frame(question)))
        _hear(stream, 2)


def _hear(stream: socket.socket, num_messages: int) -> list[Message]:
    """Return that many messages, or those that came before the end of a stream."""
    framing, heard = Framing(), list[Message]()
    while len(heard) < num_messages and (data := stream.recv(2**16)):
        heard += map(decode_frame, framing.feed(data))
    return heard


def hold_half_frames(raid: Raid) -> None:
    """Send all of a frame but its end, and stay."""
    num_bytes = _SIZES[sum(raid.counts) % len(_SIZES)]
    with raid.greet() as stream:
        with contextlib.suppress(TimeoutError):
            stream.sendall(LENGTH.pack(num_bytes) + bytes(num_bytes - 1))
        raid.is_over.wait()


def leave_half_opens(raid: Raid) -> None:
    """Open a session, send the beginning of another Open, and hang up."""
    with raid.greet() as stream:
        (welcome,) = _hear(stream, 1)
        if isinstance(welcome, Welcome):
            whole = _pack(encode_frame(_make_open(welcome)))
            stream.sendall(whole)
            _hear(stream, 1)
            stream.sendall(whole[: len(whole) // 2])


def _make_open(welcome: Welcome) -> Open:
    session = SessionId(token_bytes(16))
    return Open(session, 1, welcome.model_id, welcome.span, 1, 64, WireDtype.FP32)


def upload_huge_adapters(raid: Raid) -> None:
    """Upload an adapter whose rank is higher than any that a linear has a use for."""
    with raid.greet() as stream:
        (welcome,) = _hear(stream, 1)
        if isinstance(welcome, Welcome):
            upload = UploadId(SessionId(token_bytes(16)))
            config, tensors = LoraConfig(MAX_RANK, 1).to_json(), _make_tensors(welcome.span.start)
            head = AdapterHead(upload, make_adapter_id(config, tensors), config, len(tensors))
            for message in (head, *cut_adapter(upload, tensors)):
                stream.sendall(_pack(encode_frame(message)))
            _hear(stream, 1)


@functools.cache
def _make_tensors(block: int) -> bytes:
    linear, row = f"{PREFIX}model.layers.{block}.self_attn.q_proj", (MAX_RANK, 8)
    down = numpy.zeros(row, numpy.float32)
    return safetensors.numpy.save({linear + DOWN: down, linear + UP: down.reshape(row[::-1])})


def shake_hands(raid: Raid) -> None:
    """Connect, finish the handshake, hang up."""
    with raid.connect() as connected, _CONTEXT.wrap_socket(connected):
        pass


def begin_handshakes(raid: Raid) -> None:
    """Say always the same first words of TLS, which cost nothing, and hang up on the answer."""
    with raid.connect() as connected:
        connected.sendall(_FIRST_WORDS)
        connected.recv(2**12)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def connect_only(raid: Raid) -> None:
    """Connect and hang up without a word."""
    with raid.connect() as connected:
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _make_first_words() -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        _CONTEXT.wrap_bio(incoming, outgoing).do_handshake()
    return outgoing.read()


_FIRST_WORDS = _make_first_words()

ATTACKS: dict[str, tuple[Callable[[Raid], None], int]] = {
    "tiny frames": (send_tiny_frames, 32),
    "small questions": (ask_small_questions, 32),
    "half frames": (hold_half_frames, 513),
    "handshakes": (shake_hands, 16),
    "half handshakes": (begin_handshakes, 16),
    "connections": (connect_only, 16),
    "record questions": (ask_for_records, 16),
    "half opens": (leave_half_opens, 16),
    "huge adapters": (upload_huge_adapters, 16),
}
"""By name, each with its number of strangers."""


def spin(is_over: threading.Event) -> None:
    while not is_over.is_set():
        sum(range(10_000))


def _carry_out(name: str, address: tuple[str, int], is_over: threading.Event) -> int:
    """Attack, or keep the core busy, until it is over; return how often."""
    if name not in ATTACKS:
        spin(is_over)
        return 0
    return Raid(address, is_over).carry_out(*ATTACKS[name])


def _main(host: str, port: str, core: str) -> None:
    os.sched_setaffinity(0, {int(core)})
    print(json.dumps("ready"), flush=True)
    name = "nothing"
    while True:
        is_over = threading.Event()
        counts: list[int] = []
        attacking = threading.Thread(
            target=lambda name=name, is_over=is_over, counts=counts: counts.append(
                _carry_out(name, (host, int(port)), is_over)
            )
        )
        attacking.start()
        line = sys.stdin.readline()
        is_over.set()
        attacking.join()
        if not line:
            return
        name = line.strip()
        print(json.dumps(counts[0]), flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
