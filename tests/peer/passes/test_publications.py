"""What a peer does with publications that are uploaded to it, and who may fetch them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from adapter_talk import BOB, greet, keep, make_leaves, pack
from pass_talk import make_pass
from service_scene import SPAN, Peer, Talk, assert_declined, with_peer

from shoal.protocol.errors import ErrorCode
from shoal.protocol.ids import AdapterId, SessionId, UploadId
from shoal.protocol.messages.adapters import (
    KEEP_SECONDS,
    AdapterHead,
    AdapterKept,
    AdapterPiece,
    PublicationFetch,
    cut_adapter,
)
from shoal.protocol.messages.session import Queued
from shoal.protocol.spans import Span

UPLOAD = UploadId(SessionId(bytes([9]) * 16))


async def upload(talk: Talk, head: AdapterHead, data: bytes) -> Any:
    await talk.say(head, *cut_adapter(head.upload_id, data))
    while isinstance(answer := await talk.hear(), Queued):
        pass
    return answer


def ask(name: AdapterId, start: int = 0, num_blocks: int = 0) -> PublicationFetch:
    return PublicationFetch(make_pass(1).pass_id, name, start, num_blocks)


@with_peer()
async def test_holder_serves_its_blocks_to_anybody_and_says_how_long(peer: Peer) -> None:
    leaves = make_leaves(0, 1, 2, 3)
    manifest = leaves.manifest

    anna = await greet(peer)
    head, data = leaves.cut(UPLOAD, SPAN)
    assert await upload(anna, head, data) == AdapterKept(UPLOAD, KEEP_SECONDS)
    adapters = peer.service.adapters
    assert adapters.shared.used_bytes == manifest.num_bytes + len(data)
    await asyncio.sleep(100.0)

    anna, bert = await greet(peer), await greet(peer, BOB)
    found = await bert.ask(ask(manifest.name, 1, 2))
    assert isinstance(found, AdapterHead)
    assert found.manifest == manifest
    pieces: list[bytes] = []
    while isinstance(message := await bert.hear(), AdapterPiece):
        pieces.append(message.data)
    assert b"".join(pieces) == data
    assert isinstance(message, AdapterKept)
    assert 199.0 < message.keep_seconds <= 200.0
    assert await bert.ask(ask(manifest.name)) == message
    renewed = await anna.ask(ask(manifest.name))
    assert isinstance(renewed, AdapterKept)
    assert renewed.keep_seconds == KEEP_SECONDS
    refused = await bert.ask(ask(manifest.name, 0, 2))
    assert_declined(refused, ErrorCode.WRONG_SPAN)

    await asyncio.sleep(0.9 * KEEP_SECONDS)
    assert len(adapters) == 1
    await asyncio.sleep(0.2 * KEEP_SECONDS)
    assert (len(adapters), adapters.shared.used_bytes) == (0, 0)


@pytest.mark.parametrize("what", ["other blocks", "too many blocks", "other bytes"])
@with_peer()
async def test_upload_that_does_not_fit_is_refused_and_leaves_nothing(
    peer: Peer, what: str
) -> None:
    leaves = make_leaves(0, 1, 2, 3)

    span = {"other blocks": Span(3, 4), "too many blocks": Span(0, 3)}.get(what, SPAN)
    head, data = leaves.cut(UPLOAD, span)
    if what == "other bytes":
        data = data[:-1] + bytes([data[-1] ^ 1])
    code = ErrorCode.BAD_VALUES if what == "other bytes" else ErrorCode.WRONG_SPAN
    assert_declined(await upload(await greet(peer), head, data), code)
    assert (len(peer.service.adapters), peer.service.adapters.shared.used_bytes) == (0, 0)


@pytest.mark.parametrize("is_published", [False, True])
@with_peer()
async def test_adapter_that_is_private_or_whole_is_served_to_nobody(
    peer: Peer, is_published: bool
) -> None:
    """Publishers of protocol version 5 upload whole files."""

    anna = await greet(peer)
    name = await keep(anna, pack(), is_published=is_published)
    for talk in (anna, await greet(peer, BOB)):
        for asked in (ask(name), ask(name, 1, 2)):
            assert_declined(await talk.ask(asked), ErrorCode.UNKNOWN_ADAPTER)
