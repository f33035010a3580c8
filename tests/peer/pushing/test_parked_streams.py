"""What a peer that can be dialled does with streams that are offered to it, by whomever."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest
from reverse_scene import FRAME, HELLO, HOME, ReverseScene, in_scene, make_welcome, name
from service_scene import DeafStream, Peer, Talk, assert_declined, with_peer

from shoal.protocol.errors import ErrorCode, UnavailableError
from shoal.protocol.fair_share import Tenant
from shoal.protocol.identity import Identity
from shoal.protocol.limits import MAX_PIECE_BYTES
from shoal.protocol.messages.reverse_connections import Parked, make_offer
from shoal.protocol.messages.session import Attach, Hello, Lane, Probe, Welcome
from shoal.protocol.spans import Span
from shoal.protocol.versions import REVERSE_VERSION

STRANGER = Identity(bytes([3]) * 32)


async def park(scene: ReverseScene, identity: Identity = HOME, host: str = "home") -> Talk:
    talk = await scene.offer(identity, host)
    assert isinstance(await talk.hear(), Parked)
    await asyncio.sleep(0.1)
    return talk


async def answer_hello(talk: Talk) -> None:
    assert isinstance(await talk.hear(), Hello)
    await talk.say(make_welcome())


async def is_over(talk: Talk) -> bool:
    """Return whether the public peer has ended a stream on which nothing more was said."""
    async with asyncio.timeout(60):
        try:
            return await talk.hear() is None
        except UnavailableError:
            return True


# ---- the use of it


@pytest.mark.parametrize("is_bulk", [False, True])
@in_scene()
async def test_what_is_pushed_goes_over_the_stream_that_was_parked(
    scene: ReverseScene, is_bulk: bool
) -> None:
    talk = await scene.offer(is_bulk=is_bulk)
    assert isinstance(await talk.hear(), Parked)
    await asyncio.sleep(3600 / 8)  # it keeps

    pusher = scene.public.push(name(), Lane.BULK if is_bulk else Lane.INTERACTIVE)
    await answer_hello(talk)

    assert isinstance(await talk.hear(), Attach)
    assert isinstance(await talk.hear(), Probe)
    assert pusher.num_bytes_left == len(FRAME)
    assert pusher.num_losses == 0


@in_scene()
async def test_stream_of_the_other_lane_is_not_used(scene: ReverseScene) -> None:
    await park(scene)

    pusher = scene.public.push(name(), Lane.BULK)
    await asyncio.sleep(1)

    assert pusher.num_losses == 1


@in_scene()
async def test_stream_that_is_parked_after_a_failure_is_used_at_once(scene: ReverseScene) -> None:
    scene.public.push(name())
    await asyncio.sleep(1)
    talk = await park(scene)

    scene.public.push(name())

    await answer_hello(talk)


@in_scene()
async def test_peer_that_does_not_answer_on_its_newest_stream_may_on_the_other(
    scene: ReverseScene,
) -> None:
    older = await park(scene)
    await park(scene)

    pusher = scene.public.push(name())
    await answer_hello(older)

    assert isinstance(await older.hear(), Attach)
    assert pusher.num_losses == 0


@in_scene()
async def test_another_peer_behind_the_stream_is_not_pushed_to(scene: ReverseScene) -> None:
    talk = await park(scene)

    pusher = scene.public.push(name())
    await talk.hear()
    await talk.say(make_welcome(STRANGER))
    await asyncio.sleep(1)

    assert pusher.num_losses == 1


@in_scene()
async def test_stream_that_has_ended_is_forgotten(scene: ReverseScene) -> None:
    talk = await park(scene)
    assert scene.public.parked.has(HOME.peer_id, Lane.INTERACTIVE)

    await talk.stream.close()
    await asyncio.sleep(1)

    assert not scene.public.parked.has(HOME.peer_id, Lane.INTERACTIVE)


@in_scene()
async def test_parked_stream_outlives_the_span_that_was_served_and_holds_nothing_of_it(
    scene: ReverseScene,
) -> None:
    scene.public.handler.service = None
    service = scene.public.open(Span(0, 3))
    talk = await park(scene)

    scene.public.handler.service = None
    await service.hang_up()
    old, service = weakref.ref(service), scene.public.open(Span(0, 4))
    gc.collect()

    assert old() is None
    scene.public.push(name())
    await answer_hello(talk)


# ---- what strangers may try


@in_scene()
async def test_offer_of_another_peer_is_refused(scene: ReverseScene) -> None:
    talk = await scene.offer(STRANGER, peer_id=HOME.peer_id)

    assert_declined(await talk.hear(), ErrorCode.BAD_FRAME)
    assert await is_over(talk)
    assert not scene.public.parked.has(HOME.peer_id, Lane.INTERACTIVE)


@in_scene()
async def test_offer_that_was_made_on_another_stream_is_refused(scene: ReverseScene) -> None:
    heard, replayed = await scene.dial(), await scene.dial("thief")
    welcomes = [await talk.ask(HELLO) for talk in (heard, replayed)]
    assert isinstance(welcomes[0], Welcome)
    fingerprint = scene.public.endpoint.fingerprint
    offer = make_offer(HOME, fingerprint, welcomes[0].nonce, False)

    assert isinstance(await heard.ask(offer), Parked)

    assert_declined(await replayed.ask(offer), ErrorCode.BAD_FRAME)


@pytest.mark.parametrize("max_version", [1, REVERSE_VERSION - 1])
@in_scene()
async def test_who_speaks_an_older_version_has_nothing_to_sign(
    scene: ReverseScene, max_version: int
) -> None:
    talk = await scene.dial()
    welcome = await talk.ask(Hello(1, max_version, "old"))
    assert isinstance(welcome, Welcome)
    assert welcome.nonce == b""

    offer = make_offer(HOME, scene.public.endpoint.fingerprint, b"", False)

    assert_declined(await talk.ask(offer), ErrorCode.BAD_FRAME)


@with_peer(is_relayed=True)
async def test_peer_that_cannot_be_dialled_takes_no_offers(peer: Peer) -> None:
    talk = await peer.dial()
    welcome = await talk.ask(HELLO)
    assert isinstance(welcome, Welcome)
    assert welcome.nonce == b""

    offer = make_offer(HOME, peer.endpoint.fingerprint, b"", False)

    assert_declined(await talk.ask(offer), ErrorCode.BAD_FRAME)


@in_scene()
async def test_one_address_gets_its_share_whatever_peers_it_makes_up(scene: ReverseScene) -> None:
    made_up = [Identity(bytes([9, number]) * 16) for number in range(200)]
    num_kept = 0
    for number in range(400):
        talk = await scene.offer(made_up[number % 200], "flood", is_bulk=number >= 200)
        num_kept += isinstance(await talk.hear(), Parked)

    await park(scene)

    assert num_kept == 512 // 2 + 1


@in_scene()
async def test_stream_that_is_refused_takes_the_place_of_none(scene: ReverseScene) -> None:
    made_up = [Identity(bytes([9, number]) * 16) for number in range(200)]
    for _ in range(2):
        await park(scene)
    for number in range(257):
        identity = made_up[number % 200]
        await (await scene.offer(identity, "flood", is_bulk=number >= 200)).hear()

    refused = await scene.offer(host="flood")
    assert_declined(await refused.hear(), ErrorCode.BUSY)

    for _ in range(2):
        assert await scene.public.parked.take(HOME.peer_id, Lane.INTERACTIVE) is not None


@in_scene()
async def test_who_does_not_read_that_a_stream_is_kept_has_gone(scene: ReverseScene) -> None:
    offer = make_offer(HOME, scene.public.endpoint.fingerprint, bytes(32), False)
    async with asyncio.timeout(60):
        with pytest.raises(UnavailableError, match="does not read"):
            await scene.public.parked.keep(offer, DeafStream())

    assert not scene.public.parked.has(HOME.peer_id, Lane.INTERACTIVE)


@in_scene()
async def test_one_peer_has_two_streams_of_a_lane_and_the_newest_ones(scene: ReverseScene) -> None:
    talks = [await park(scene) for _ in range(3)]

    assert await is_over(talks[0])
    scene.public.push(name())
    await answer_hello(talks[2])


@in_scene()
async def test_who_talks_on_a_parked_stream_is_hung_up_on(scene: ReverseScene) -> None:
    talk = await park(scene)

    await talk.say(HELLO)

    assert await is_over(talk)
    assert not scene.public.parked.has(HOME.peer_id, Lane.INTERACTIVE)


@in_scene()
async def test_large_frame_on_a_parked_stream_takes_no_memory(scene: ReverseScene) -> None:
    talk = await park(scene)

    await talk.stream.send(bytes(MAX_PIECE_BYTES + 1))

    assert await is_over(talk)


@in_scene()
async def test_what_is_said_behind_an_offer_ends_the_stream(scene: ReverseScene) -> None:
    talk = await scene.offer()
    await talk.say(HELLO)

    assert isinstance(await talk.hear(), Parked)
    assert await is_over(talk)


@in_scene()
async def test_client_that_names_the_peer_again_and_again_uses_up_nothing_of_others(
    scene: ReverseScene,
) -> None:
    talk = await park(scene)
    pushers = [scene.public.push(name(number=number)) for number in range(1, 200)]
    await answer_hello(talk)
    await asyncio.sleep(1)

    assert not any(pusher.num_losses for pusher in pushers)
    assert pushers[0].tenant == Tenant("192.0.2.1")
