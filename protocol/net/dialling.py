"""Dialling a peer: the greeting that clients and peers send first on a stream."""

import asyncio
from collections.abc import Sequence

from .. import versions
from ..endpoints import Endpoint, read_address
from ..errors import (
    NotDialledError,
    RemoteProtocolError,
    StaleAnnouncementError,
    UnavailableError,
    UsageError,
)
from ..ids import NO_CLIENT, ClientToken, ModelId, PeerId
from ..messages.codec import check_kind, encode_frame, read_answer
from ..messages.fields import Message
from ..messages.session import NO_MODEL_ID, Hello, Welcome
from ..records.announcements import Announcement
from ..spans import Span
from .addresses import list_own_interfaces
from .clock import AnswerTimeout, Clock
from .tasks import cancel_all
from .transport import Stream, Transport, admit_pieces

_HEAD_START_SECONDS = 0.25
"""How long the local network is tried alone (the Connection Attempt Delay of RFC 8305)."""


def list_near(peer: Announcement) -> list[Endpoint]:
    """Return where to dial a peer in a network of this machine, if others cannot dial it.

    Many homes use the same addresses, so somebody else may be there.
    """
    if peer.endpoints or not peer.local_endpoints:
        return []
    networks = [interface.network for interface in list_own_interfaces()]
    return [
        endpoint
        for endpoint in peer.local_endpoints
        if any(read_address(endpoint.host) in network for network in networks)
    ]


async def dial_peer(
    transport: Transport, clock: Clock, peer: Announcement, timeout_seconds: float
) -> Stream:
    """Dial a peer at its endpoints, or within its network where that is also ours.

    The first that answers is taken, and the others are hung up on. Raises what `dial` does.
    """
    if not (near_endpoints := list_near(peer)):
        return await dial(transport, clock, peer.peer_id, peer.all_endpoints, timeout_seconds)

    async def dial_far() -> Stream:
        # Even where nobody is near any more: the relay may be that of a stranger, who would learn
        # from an earlier dial what our network refuses.
        await asyncio.sleep(_HEAD_START_SECONDS)
        return await dial(transport, clock, peer.peer_id, peer.all_endpoints, timeout_seconds)

    near = dial(transport, clock, peer.peer_id, near_endpoints, timeout_seconds)
    return await _take_first([asyncio.create_task(near), asyncio.create_task(dial_far())])


async def _take_first(dials: Sequence[asyncio.Task[Stream]]) -> Stream:
    """Return the stream that is open first, and close all others, also when cancelled.

    Raises the error of the last dial where all have failed. `staggered_race` of asyncio forgets an
    open stream when it is cancelled.
    """
    going_on = set(dials)
    try:
        while going_on and not _list_open(dials):
            _, going_on = await asyncio.wait(going_on, return_when=asyncio.FIRST_COMPLETED)
        await cancel_all(going_on)
        opened = _list_open(dials)
        for stream in opened[1:]:
            await stream.close()
        return opened[0] if opened else dials[-1].result()
    except BaseException:
        await cancel_all(dials)
        for stream in _list_open(dials):
            await stream.close()
        raise


def _list_open(dials: Sequence[asyncio.Task[Stream]]) -> list[Stream]:
    """Return the streams of dials that have succeeded; looks at all errors of the others."""
    ended = [dial for dial in dials if dial.done() and not dial.cancelled()]
    return [dial.result() for dial in ended if dial.exception() is None]


async def dial(
    transport: Transport,
    clock: Clock,
    peer_id: PeerId,
    endpoints: Sequence[Endpoint],
    timeout_seconds: float,
) -> Stream:
    """Try the endpoints that a peer announced in their order, for at most so many seconds in all.

    Each may take its share of the time that is left, so that a silent one leaves time for the next.
    A peer has one TLS key: endpoints with another key than the first are skipped, or a made-up
    announcement could lead to another peer behind an address of its own.

    Raises UnavailableError (StaleAnnouncementError where somebody else answers, NotDialledError
    where not all were tried) or RemoteProtocolError.
    """
    key = next((endpoint.fingerprint for endpoint in endpoints if endpoint.fingerprint), "")
    endpoints = [endpoint for endpoint in endpoints if endpoint.fingerprint in ("", key)]
    deadline = clock.now() + timeout_seconds
    refusal: NotDialledError | None = None
    error: UnavailableError | RemoteProtocolError
    error = RemoteProtocolError(f"peer …{peer_id[-6:]} announced no endpoint")
    for index, endpoint in enumerate(endpoints):
        seconds = max(0.0, deadline - clock.now()) / (len(endpoints) - index)
        try:
            return await transport.open_stream(endpoint, seconds)
        except NotDialledError as failure:
            refusal = failure
        except UnavailableError as failure:
            error = failure
        except RemoteProtocolError as failure:  # another certificate, or another program
            error = StaleAnnouncementError(str(failure))
            error.__cause__ = failure
        except UsageError as failure:
            error = RemoteProtocolError(
                f"the peer announced an endpoint that cannot be used: {failure}"
            )
            error.__cause__ = failure
    raise refusal or error


async def greet(
    stream: Stream,
    name: str,
    clock: Clock,
    client: ClientToken = NO_CLIENT,
    *more: Message,
    model_id: ModelId = NO_MODEL_ID,
) -> tuple[Welcome, float]:
    """Say Hello (and `more` right behind it); return the Welcome and the round-trip seconds.

    Raises RefusedError when the versions do not fit, RemoteProtocolError for any other answer.
    """
    asked_at = clock.now()
    hello = Hello(versions.MIN_VERSION, versions.MAX_VERSION, versions.SOFTWARE, client, model_id)
    await stream.send(encode_frame(hello))
    for message in more:
        await stream.send(encode_frame(message))
    answer = check_kind(read_answer(await stream.receive(), name), Welcome, name)
    return answer, clock.now() - asked_at


async def greet_peer(stream: Stream, peer_id: PeerId, clock: Clock) -> tuple[Welcome, float]:
    """Greet a peer that is to send nothing large, and check that it is this one.

    Returns and raises what `greet` does; closes the stream when that fails.
    """
    name = f"peer …{peer_id[-6:]}"
    stream.set_gate(admit_pieces)
    try:
        welcome, rtt_seconds = await greet(stream, name, clock)
        if welcome.peer_id != peer_id:
            raise RemoteProtocolError(f"another peer answers for {name}")
    except BaseException:
        await stream.close()
        raise
    return welcome, rtt_seconds


async def open_greeted(
    transport: Transport,
    clock: Clock,
    peer: Announcement,
    span: Span,
    timeout_seconds: float,
    client: ClientToken = NO_CLIENT,
    *more: Message,
    names_model: bool = False,
) -> tuple[Stream, float]:
    """Dial a peer that serves a span, say Hello (`more` right behind it), and check who answers.

    `names_model`: ask for what the peer announced of this model, beside which it may do other
    things. Returns the stream and the round-trip seconds. Raises SilentError when all that takes
    longer than `timeout_seconds`, and what `dial`, `greet` and `check_welcome` do; nothing is left
    open then.
    """
    name = f"peer …{peer.peer_id[-6:]} (blocks {span})"
    wanted = peer.model_id if names_model else NO_MODEL_ID
    async with AnswerTimeout(timeout_seconds, f"{name} did not answer in time"):
        stream = await dial_peer(transport, clock, peer, timeout_seconds)
        try:
            welcome, rtt_seconds = await greet(stream, name, clock, client, *more, model_id=wanted)
            check_welcome(welcome, peer.peer_id, span, peer.model_id)
        except BaseException:
            await stream.close()
            raise
        return stream, rtt_seconds


def check_welcome(welcome: Welcome, peer_id: PeerId, span: Span, model_id: ModelId) -> None:
    """Raise StaleAnnouncementError or RemoteProtocolError unless the peer is what it announced."""
    if welcome.peer_id != peer_id:
        raise StaleAnnouncementError(f"another peer answers for …{peer_id[-6:]}")
    if not versions.MIN_VERSION <= welcome.version <= versions.MAX_VERSION:
        raise RemoteProtocolError(f"peer …{peer_id[-6:]} chose an unsupported version")
    if welcome.model_id == model_id and not welcome.span.covers(span):
        raise StaleAnnouncementError(
            f"peer …{peer_id[-6:]} announced blocks {span} and serves {welcome.span}"
        )
    if welcome.model_id != model_id:
        raise StaleAnnouncementError(f"peer …{peer_id[-6:]} now serves another model")


async def measure_rtt(
    transport: Transport,
    clock: Clock,
    peer_id: PeerId,
    endpoints: Sequence[Endpoint],
    timeout_seconds: float,
) -> float:
    """Say hello to a peer and hang up; return the seconds that its answer took.

    Raises UnavailableError, RefusedError or RemoteProtocolError.
    """
    async with AnswerTimeout(timeout_seconds, f"peer …{peer_id[-6:]} did not answer in time"):
        stream = await dial(transport, clock, peer_id, endpoints, timeout_seconds)
        _, rtt_seconds = await greet_peer(stream, peer_id, clock)
    await stream.close()
    return rtt_seconds
