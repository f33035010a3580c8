"""Passes by hand: what a client says on a stream, and what it hears."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from service_scene import HIDDEN, MODEL_ID, SPAN, Talk, draw_hidden
from torch import Tensor

from shoal.kernels.wire_tensors import DTYPES, decode_tensor, encode_tensor
from shoal.protocol.ids import PassId, SessionId
from shoal.protocol.messages.passes import Pass, PassKind, PassPiece, Slot, cut_vectors
from shoal.protocol.messages.session import Queued
from shoal.protocol.tensors import WireDtype, WireTensor

ROWS, TOKENS = 2, 7
TEXTS = draw_hidden(1, ROWS, TOKENS)
GRADIENTS = draw_hidden(2, ROWS, TOKENS)
PROMPTS = draw_hidden(3, 2, 3)[:, None]  # for two blocks, all rows the same


def make_pass(number: int = 1, **changes: Any) -> Pass:
    """Return a pass forward; `number` names it."""
    pass_id = PassId(SessionId(bytes([number]) * 16))
    asked = Pass(pass_id, PassKind.FORWARD, MODEL_ID, SPAN, ROWS, TOKENS, WireDtype.FP32)
    return replace(asked, **changes)


def cut(asked: Pass, slot: Slot, tensor: Tensor) -> Iterator[PassPiece]:
    """Yield the pieces of a tensor in float32."""
    vectors = tensor.reshape(-1, HIDDEN)
    for part in cut_vectors(len(vectors), WireDtype.FP32, HIDDEN):
        data = encode_tensor(vectors[part.start : part.stop])
        wire = WireTensor(WireDtype.FP32, 1, len(part), HIDDEN, data)
        yield PassPiece(asked.pass_id, slot, part.start, wire)


async def ask(talk: Talk, asked: Pass, **tensors: Tensor) -> list[Any]:
    """Send a whole pass; return everything that is answered, without the signs of life."""
    await talk.say(asked)
    for name, tensor in tensors.items():
        await talk.say(*cut(asked, Slot[name], tensor))
    answers: list[Any] = []
    while not answers or isinstance(answers[-1], PassPiece):
        message = await talk.hear()
        if not isinstance(message, Queued):
            answers.append(message)
    return answers


def join(answers: list[Any], slot: Slot, *shape: int) -> Tensor:
    """Return a tensor of an answer; the rest of its last vector is left out."""
    pieces = [one for one in answers if isinstance(one, PassPiece) and one.slot is slot]
    tensors = [one.tensor for one in pieces]
    decoded = [decode_tensor(t.data, DTYPES[t.dtype.name], t.shape)[0] for t in tensors]
    return torch.cat(decoded).reshape(-1)[: math.prod(shape)].view(*shape)
