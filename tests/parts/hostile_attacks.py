"""What strangers try on a peer: every attack is a function of a gang of them."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import replace

import torch
from hostile_strangers import (
    HELLO,
    HIDDEN,
    PATIENCE_SECONDS,
    Gang,
    gather_gang,
    make_session,
    make_step,
    patch_frame,
)
from raw_connection import dial_raw

from shoal.protocol import limits
from shoal.protocol.errors import ErrorCode
from shoal.protocol.identity import Identity
from shoal.protocol.messages.codec import HEADER_BYTES, decode_frame, encode_frame
from shoal.protocol.messages.fields import Message
from shoal.protocol.messages.reverse_connections import Parked, make_offer
from shoal.protocol.messages.session import Close, Declined, Hello, Probe, Welcome
from shoal.protocol.net.frame_stream import Framing
from shoal.protocol.versions import MAX_VERSION

SEED = 7


async def send_random_frames(gang: Gang) -> None:
    rng = random.Random(SEED)
    for length in (0, 1, HEADER_BYTES - 1, HEADER_BYTES, 200, 5000, 2**20):
        for greets in (False, True):
            stranger = await (gang.greet() if greets else gang.dial())
            await stranger.say(rng.randbytes(length))
            await stranger.expect_end(ErrorCode.BAD_FRAME)


async def send_mutated_frames(gang: Gang) -> None:
    """Flip one byte of a good frame: the peer may understand it or not, but says so."""
    rng = random.Random(SEED)
    for number in range(40):
        session = make_session()
        stranger = await gang.open(session)
        frame = bytearray(encode_frame(make_step(session)))
        frame[rng.randrange(HEADER_BYTES)] ^= 1 << rng.randrange(8)
        # Told apart from what is silently dropped (an old sequence, say) by the end that follows.
        await stranger.say(bytes(frame), b"end")
        answers: list[Message] = []
        while (answer := await stranger.hear()) is not None:
            answers.append(answer)
        # None where the peer had ended the stream before the second frame left.
        assert len(answers) <= 2, (number, answers)
        for answer in answers[-1:]:
            assert isinstance(answer, Declined), (number, answers)
            assert answer.code is ErrorCode.BAD_FRAME


async def send_truncated_frames(gang: Gang) -> None:
    session = make_session()
    frame = encode_frame(make_step(session))
    for length in (1, HEADER_BYTES, HEADER_BYTES + 3, len(frame) - 1):
        stranger = await gang.greet()
        await stranger.say(frame[:length])
        await stranger.expect_end(ErrorCode.BAD_FRAME)
    stranger = await gang.greet()
    await stranger.say(frame + b"x")
    await stranger.expect_end(ErrorCode.BAD_FRAME)


async def send_largest_frames(gang: Gang) -> None:
    """As large as the limit allows: garbage first, then a step of a width no model has."""
    stranger = await gang.greet()
    await stranger.say(bytes(limits.MAX_FRAME_BYTES))
    await stranger.expect_end(ErrorCode.BAD_FRAME)
    session = make_session()
    stranger = await gang.open(session)
    for sequence in range(1, 4):
        hidden = torch.zeros(1, 60, limits.MAX_HIDDEN_SIZE)
        answer = await stranger.ask(make_step(session, hidden, sequence))
        assert isinstance(answer, Declined)
        assert answer.session == session


async def hang_up_behind_large_frames(gang: Gang) -> None:
    """Leave by a broken connection, with what was just read still in the hands of the peer."""
    hidden = torch.zeros(1, 60, limits.MAX_HIDDEN_SIZE)
    for _ in range(16):
        stranger = await gang.greet()
        assert isinstance(await stranger.ask(make_step(make_session(), hidden)), Declined)
        stranger.break_off()


async def send_oversized_frames(gang: Gang) -> None:
    """Beyond the limit our own transport does not go, so this is written by hand."""
    for num_bytes in (limits.MAX_FRAME_BYTES + 1, 2**31, 2**32 - 9):
        async with dial_raw(gang.target.endpoint) as (reader, writer):
            writer.writelines(Framing().pack(encode_frame(HELLO)))
            await read_frame(reader)
            writer.write(struct.pack("<I", num_bytes) + bytes(2**20))
            answer = decode_frame(await read_frame(reader))
            assert isinstance(answer, Declined), answer
            assert answer.code is ErrorCode.BAD_FRAME


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(PATIENCE_SECONDS):
        (num_bytes,) = struct.unpack("<I", await reader.readexactly(4))
        return await reader.readexactly(num_bytes)


async def send_wrong_versions(gang: Gang) -> None:
    stranger = await gang.dial()
    await stranger.say(patch_frame(encode_frame(HELLO), 2, "B", 2))
    await stranger.expect_end(ErrorCode.BAD_FRAME)
    for low, high in ((0, 0), (MAX_VERSION + 1, 9), (9, 2), (2**31, 2**32 - 1)):
        stranger = await gang.dial()
        await stranger.say(Hello(low, high, "from elsewhere"))
        await stranger.expect_end(ErrorCode.BAD_VERSION)


async def send_unknown_codes(gang: Gang) -> None:
    """A good step but for one number of the header, whose meaning is not known yet."""
    frame = encode_frame(make_step(make_session()))
    magic, kind, flags, dtype, codec = (0, "B"), (3, "B"), (4, "H"), (6, "B"), (7, "B")
    for offset, layout in (magic, kind, flags, dtype, codec):
        stranger = await gang.greet()
        await stranger.say(patch_frame(frame, offset, layout, 0x80))
        await stranger.expect_end(ErrorCode.BAD_FRAME)


async def contradict_shapes(gang: Gang) -> None:
    """Every number that says how long something is, too small, too large and enormous."""
    frame = encode_frame(make_step(make_session()))
    for offset in (40, 44, 48, 52, 56):
        for value in (0, 2, 2**16 + 1, 2**31, 2**32 - 1):
            patched = patch_frame(frame, offset, "I", value)
            if patched != frame:
                stranger = await gang.greet()
                await stranger.say(patched)
                await stranger.expect_end(ErrorCode.BAD_FRAME)


async def exceed_shapes(gang: Gang) -> None:
    """Shapes that fit their bytes and the model, and are beyond what anyone may send."""
    shapes = {
        (1, 1, 257 * HIDDEN): (limits.MAX_BATCH_ROWS + 1, 1, HIDDEN),
        (2, 1, 4097 * 8): (1, limits.MAX_STEP_TOKENS + 1, 16),
        (1, 6, 10923): (1, 1, limits.MAX_HIDDEN_SIZE + 2),
    }
    for honest, beyond in shapes.items():
        assert torch.Size(honest).numel() == torch.Size(beyond).numel()
        frame = encode_frame(make_step(make_session(), torch.zeros(honest)))
        for offset, number in zip((40, 44, 48), beyond, strict=True):
            frame = patch_frame(frame, offset, "I", number)
        stranger = await gang.greet()
        await stranger.say(frame)
        await stranger.expect_end(ErrorCode.BAD_FRAME)
    empty = encode_frame(make_step(make_session()))[:HEADER_BYTES]
    stranger = await gang.greet()
    await stranger.say(patch_frame(patch_frame(empty, 44, "I", 0), 56, "I", 0))
    await stranger.expect_end(ErrorCode.BAD_FRAME)


async def send_long_control_parts(gang: Gang) -> None:
    """A field of the future, which a peer skips, but not at any length."""
    frame = encode_frame(make_step(make_session()))
    row_map = b"\x0a\x01\x00"
    control = row_map + b"\x7a\x80\x80\x04" + bytes(2**16)  # field 15, so many bytes
    assert len(control) > limits.MAX_CONTROL_BYTES
    stranger = await gang.greet()
    head = patch_frame(frame[:HEADER_BYTES], 52, "I", len(control))
    await stranger.say(head + control + frame[HEADER_BYTES:])
    await stranger.expect_end(ErrorCode.BAD_FRAME)


async def send_negative_positions(gang: Gang) -> None:
    frame = encode_frame(make_step(make_session()))
    for position in (-1, -(2**31), limits.MAX_SESSION_TOKENS + 1):
        stranger = await gang.greet()
        await stranger.say(patch_frame(frame, 36, "I", position % 2**32))
        await stranger.expect_end(ErrorCode.BAD_FRAME)


async def step_unknown_sessions(gang: Gang) -> None:
    stranger = await gang.greet()
    for _ in range(80):
        session = make_session()
        await stranger.say(Close(session, 1))
        answer = await stranger.ask(make_step(session))
        assert isinstance(answer, Declined)
        assert (answer.session, answer.code) == (session, ErrorCode.UNKNOWN_SESSION)


async def flood_with_useless_frames(gang: Gang) -> None:
    """Many small frames from several streams, which change nothing; some have an answer."""
    unknown = make_session()
    content = b"".join(Framing().pack(encode_frame(Close(unknown, 1)))) * 400
    question = b"".join(Framing().pack(encode_frame(Probe(unknown, 1))))
    async with contextlib.AsyncExitStack() as floods:
        readers: list[asyncio.StreamReader] = []
        for _ in range(8):
            flood = dial_raw(gang.target.endpoint, "127.0.0.2")
            reader, writer = await floods.enter_async_context(flood)
            writer.write(b"".join(Framing().pack(encode_frame(HELLO))) + content + question)
            readers.append(reader)
        for reader in readers:
            framing, num_answers = Framing(), 0
            while num_answers < 2:
                async with asyncio.timeout(PATIENCE_SECONDS):
                    data = await reader.read(2**16)
                assert data
                num_answers += len(list(framing.feed(data)))


async def go_on_behind_a_refusal(gang: Gang) -> None:
    """Send without end where nothing is read any more."""
    async with dial_raw(gang.target.endpoint) as (_, writer), asyncio.timeout(PATIENCE_SECONDS):
        with contextlib.suppress(ConnectionError):
            while not writer.transport.is_closing():
                writer.write(b"".join(Framing().pack(b"no frame of ours")) * 1000)
                await writer.drain()
                await asyncio.sleep(0)  # the break is noticed in a turn of its own


async def send_values_that_are_none(gang: Gang) -> None:
    session = make_session()
    stranger = await gang.open(session)
    for sequence, value in enumerate((torch.nan, torch.inf, -torch.inf), start=1):
        answer = await stranger.ask(make_step(session, torch.full((1, 3, HIDDEN), value), sequence))
        assert isinstance(answer, Declined), (value, answer)
        assert (answer.session, answer.code) == (session, ErrorCode.BAD_VALUES)


REFUSALS_OF_SESSIONS = (ErrorCode.BUSY, ErrorCode.CACHE_FULL, ErrorCode.UNKNOWN_SESSION)


async def drop_many_sessions(gang: Gang) -> None:
    """Strangers who fill the peer with sessions, step each once and vanish, several times over."""
    num_opened = 0
    while num_opened < 120:
        async with gather_gang(gang.target) as others:
            for _ in range(8):
                stranger = await others.greet()
                for _ in range(limits.MAX_SESSIONS_PER_STREAM):
                    session = make_session()
                    answer = await stranger.ask(others.make_open(session, num_rows=4))
                    if isinstance(answer, Declined):
                        # Beyond what one client may have, or to a step of what was beyond it:
                        # nobody waits for the answers of steps.
                        assert answer.code in REFUSALS_OF_SESSIONS, answer
                        continue
                    num_opened += 1
                    await stranger.say(make_step(session, torch.zeros(4, 20, HIDDEN)))


async def never_say_hello(gang: Gang) -> None:
    mute = [await gang.dial() for _ in range(60)]
    for stranger in mute[:15]:
        await stranger.say(make_step(make_session()))
        await stranger.expect_end(ErrorCode.BAD_FRAME)


async def send_raw_bytes(gang: Gang) -> None:
    """What is not even TLS, at the same port."""
    rng = random.Random(SEED)
    endpoint = gang.target.endpoint
    greetings = (
        b"GET / HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\xff\xff",
    )
    for content in (*greetings, *(rng.randbytes(2**size) for size in range(0, 18, 3))):
        reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
        try:
            writer.write(content)
            async with asyncio.timeout(PATIENCE_SECONDS):
                with contextlib.suppress(OSError):  # an end as well
                    writer.write_eof()
                    await reader.read()
        finally:
            writer.transport.abort()


async def hold_half_open_connections(gang: Gang) -> None:
    """Connect and say nothing, not even the first word of TLS; then go, politely or not."""
    address = (gang.target.endpoint.host, gang.target.endpoint.port)
    silent = [socket.create_connection(address, timeout=PATIENCE_SECONDS) for _ in range(200)]
    await gang.greet()
    for number, connection in enumerate(silent):
        if number % 2:
            reset = struct.pack("ii", 1, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
        connection.close()


async def offer_streams(gang: Gang) -> None:
    """As any peer, as another one, in half a frame, and with more behind it; many are left open."""
    fingerprint = gang.target.endpoint.fingerprint
    for number in range(48):
        stranger, identity = await gang.dial(), Identity(bytes([SEED, number]) * 16)
        welcome = await stranger.ask(Hello(1, MAX_VERSION, "a stranger"))
        assert isinstance(welcome, Welcome)
        offer = make_offer(identity, fingerprint, welcome.nonce, is_bulk=number % 2 == 0)
        if number % 4 == 0:
            assert isinstance(await stranger.ask(offer), Parked)
        elif number % 4 == 1:
            await stranger.say(replace(offer, peer_id=welcome.peer_id))
            await stranger.expect_end(ErrorCode.BAD_FRAME)
        elif number % 4 == 2:
            await stranger.say(encode_frame(offer)[:-1])
            await stranger.expect_end(ErrorCode.BAD_FRAME)
        else:
            assert isinstance(await stranger.ask(offer), Parked)
            assert await stranger.ask(make_step(make_session())) is None


Attack = Callable[[Gang], Awaitable[None]]
ATTACKS: tuple[Attack, ...] = (
    send_random_frames,
    send_mutated_frames,
    send_truncated_frames,
    send_largest_frames,
    hang_up_behind_large_frames,
    send_oversized_frames,
    send_wrong_versions,
    send_unknown_codes,
    contradict_shapes,
    exceed_shapes,
    send_long_control_parts,
    send_negative_positions,
    step_unknown_sessions,
    flood_with_useless_frames,
    go_on_behind_a_refusal,
    send_values_that_are_none,
    drop_many_sessions,
    never_say_hello,
    offer_streams,
    send_raw_bytes,
    hold_half_open_connections,
)
