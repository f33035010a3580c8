"""Passes of the wire to work for the engine, and what the engine made of them back to the wire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ...kernels.pauses import GiveWay
from ...kernels.wire_tensors import decode_as, encode_as
from ...protocol.messages.passes import (
    Pass,
    PassKind,
    PassPiece,
    Slot,
    choose_answer_dtype,
    cut_vectors,
)
from ...protocol.tensors import WireTensor
from ...protocol.wire.codec import encode_frame
from ..engine.adapters.trained_adapter import GatheredGradients
from ..engine.passes.passes import Gradients, PassWork
from ..streams.answer_queue import check_fits
from .named_adapters import Adapters, join_gradients


@dataclass(frozen=True)
class WireWork:
    """A pass as it came, and what was found here for it; its tensors are used up."""

    message: Pass
    tensors: dict[Slot, list[WireTensor]]
    hidden_size: int
    adapters: Adapters = ()
    gathered: GatheredGradients | None = None
    """Where the gradients of its adapter are added to, if they are."""


class PassEngine(Protocol):
    """What computes passes."""

    def run_forward(self, work: PassWork, give_way: GiveWay) -> Tensor: ...

    def run_backward(self, work: PassWork, grads_BTH: Tensor, give_way: GiveWay) -> Gradients: ...


def run_pass(engine: PassEngine, asked: WireWork, give_way: GiveWay) -> list[bytes]:
    """Return the frames that answer a pass, but for the last.

    On the compute thread: to decode and encode megabytes would hold up the event loop.
    """
    message, tensors, adapters = asked.message, asked.tensors, asked.adapters
    shape = (message.num_rows, message.num_tokens, asked.hidden_size)
    hidden_BTH = _join(tensors.pop(Slot.HIDDEN), give_way).view(shape)
    prompts = _read_prompts(message, tensors, give_way)
    wants_adapters = message.adapter_vectors > 0 or asked.gathered is not None
    work = PassWork(message.span, hidden_BTH, prompts, adapters, wants_adapters)
    if message.kind is PassKind.FORWARD:
        return _encode(message, Slot.HIDDEN, engine.run_forward(work, give_way), give_way)
    grads_BTH = _join(tensors.pop(Slot.GRADIENTS), give_way).view(shape)
    gradients = engine.run_backward(work, grads_BTH, give_way)
    frames = _encode(message, Slot.HIDDEN, gradients.hidden_BTH, give_way)
    if gradients.prompts_LBPH is not None:
        frames += _encode(message, Slot.PROMPTS, gradients.prompts_LBPH, give_way)
    if message.gather is not None and asked.gathered is not None:
        (found,) = gradients.adapters.values()  # only one is trained
        asked.gathered.add(message.gather, found, give_way)
    elif wants_adapters:
        vectors = join_gradients(adapters, gradients.adapters, asked.hidden_size)
        frames += _encode(message, Slot.ADAPTERS, vectors, give_way)
    return frames


def _read_prompts(
    message: Pass, tensors: dict[Slot, list[WireTensor]], give_way: GiveWay
) -> Tensor | None:
    if Slot.PROMPTS not in tensors:
        return None
    prompts = _join(tensors.pop(Slot.PROMPTS), give_way)
    return prompts.view(len(message.span), message.prompt_rows, message.prompt_tokens, -1)


def _join(pieces: Sequence[WireTensor], give_way: GiveWay) -> Tensor:
    """Return all vectors of a slot, [vectors, H]."""
    joined: Tensor | None = None
    start = 0
    for piece in pieces:
        give_way()
        decoded_NH = decode_as(piece.dtype.name, piece.data, piece.shape)[0]
        if joined is None:
            num_vectors = sum(one.shape[1] for one in pieces)
            joined = decoded_NH.new_empty(num_vectors, decoded_NH.shape[1])
        joined[start : start + len(decoded_NH)] = decoded_NH
        start += len(decoded_NH)
    assert joined is not None  # or the slot would not be complete
    return joined


def _encode(message: Pass, slot: Slot, tensor: Tensor, give_way: GiveWay) -> list[bytes]:
    """Return the frames of a slot's pieces."""
    width = tensor.shape[-1]
    vectors_NH, dtype = tensor.reshape(-1, width), choose_answer_dtype(message, slot)
    check_fits(vectors_NH, dtype)
    frames: list[bytes] = []
    for part in cut_vectors(len(vectors_NH), dtype, width):
        give_way()
        data = encode_as(dtype.name, vectors_NH[part.start : part.stop])
        wire = WireTensor(dtype, 1, len(part), width, data)
        frames.append(encode_frame(PassPiece(message.pass_id, slot, part.start, wire)))
    return frames
