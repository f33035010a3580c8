"""Adapters by hand: a client's files, and how it brings them to a peer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import safetensors.torch
import torch
from service_scene import HELLO, HIDDEN, Peer, Talk
from torch import Tensor

from shoal.client.adapters.adapter_versions import AdapterLeaves, AdapterVersion
from shoal.protocol.ids import AdapterId, ClientToken, SessionId, UploadId, make_adapter_id
from shoal.protocol.messages.adapters import AdapterHead, AdapterKept, LoraConfig, cut_adapter
from shoal.protocol.messages.session import Queued, Welcome
from shoal.protocol.spans import Span
from shoal.protocol.versions import MAX_VERSION

RANK = 3
CONFIG = {"peft_type": "LORA", "r": RANK, "lora_alpha": 6}
PATH = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
ALICE, BOB = ClientToken(b"the name of Anna"), ClientToken(b"the name of Bert")


def draw_matrices(seed: int = 1, blocks: tuple[int, ...] = (1, 2)) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        PATH.format(block, letter): 0.3 * torch.randn(*shape, generator=generator)
        for block in blocks
        for letter, shape in (("A", (RANK, HIDDEN)), ("B", (HIDDEN, RANK)))
    }


def make_leaves(*blocks: int) -> AdapterLeaves:
    """Return what is published of an adapter for some blocks of a model of four."""
    version = AdapterVersion(LoraConfig(RANK, 6), draw_matrices(1, blocks), False, "", 0)
    leaves = version.publish(Span(0, 4))
    assert leaves is not None
    return leaves


def pack(
    matrices: Mapping[str, Tensor] | bytes | None = None, config: Mapping[str, Any] = CONFIG
) -> tuple[bytes, bytes]:
    if matrices is None:
        matrices = draw_matrices()
    data = matrices if isinstance(matrices, bytes) else safetensors.torch.save(dict(matrices))
    return json.dumps(config).encode(), data


def make_head(files: tuple[bytes, bytes], number: int = 1, **changes: Any) -> AdapterHead:
    config, tensors = files
    upload_id = UploadId(SessionId(bytes([200 + number]) * 16))
    head = AdapterHead(upload_id, make_adapter_id(config, tensors), config, len(tensors))
    return replace(head, **changes)


async def greet(peer: Peer, client: ClientToken = ALICE) -> Talk:
    talk = await peer.dial()
    assert isinstance(
        await talk.ask(replace(HELLO, max_version=MAX_VERSION, client=client)), Welcome
    )
    return talk


async def bring(talk: Talk, files: tuple[bytes, bytes], **changes: Any) -> Any:
    """Bring an adapter; return the answer."""
    head = make_head(files, **changes)
    await talk.say(head, *cut_adapter(head.upload_id, files[1]))
    while isinstance(answer := await talk.hear(), Queued):
        pass
    return answer


async def keep(talk: Talk, files: tuple[bytes, bytes], **changes: Any) -> AdapterId:
    assert isinstance(await bring(talk, files, **changes), AdapterKept)
    return make_head(files).adapter
