"""Passes of the wire to work for the engine, and what the engine made of them back to the wire.

The adapters that a pass names are found and checked here; their gradients leave as vectors.

Tensor suffixes: B rows and T tokens of a pass, N vectors, L blocks, P tokens of a deep prompt,
H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.pauses import GiveWay
from ...kernels.wire_tensors import decode_as, encode_as
from ...protocol.errors import ErrorCode, RefusedError
from ...protocol.fair_share import Tenant
from ...protocol.ids import AdapterId
from ...protocol.messages.codec import encode_frame
from ...protocol.messages.passes import (
    Pass,
    PassKind,
    PassPiece,
    Slot,
    choose_answer_dtype,
    cut_vectors,
)
from ...protocol.tensors import WireTensor
from ..engine.adapters.adapter import Adapter
from ..engine.adapters.adapter_store import AdapterStore, KeptAdapter
from ..engine.adapters.trained_adapter import AccumulatedGradients
from ..engine.passes.span_passes import PassWork, SpanPasses
from ..engine.scheduler import count_token_cost
from ..streams.client_stream import check_fits

Adapters = tuple[Adapter | None, ...]
"""One for each row, or none at all."""

_FLOAT_BYTES = 4

_COSTS = {PassKind.FORWARD: 1, PassKind.BACKWARD: 3}
"""Backward, blocks are computed twice and differentiated."""


@dataclass(frozen=True)
class WireWork:
    """A pass as it came, and what was found here for it; its tensors are used up."""

    message: Pass
    tensors: dict[Slot, list[WireTensor]]
    hidden_size: int
    adapters: Adapters = ()
    accumulated: AccumulatedGradients | None = None
    """The sum that the gradients of its adapter are added to, if any."""


def find_kept(
    message: Pass, adapter_store: AdapterStore, tenant: Tenant
) -> dict[AdapterId, KeptAdapter]:
    """Return the adapters that a pass names, each once.

    Raises RefusedError with UNKNOWN_ADAPTER: its client may upload it again.
    """
    names = dict.fromkeys(run.adapter for run in message.adapters if run.adapter)
    return {name: adapter_store.find(name, tenant) for name in names}


def find_accumulated(
    message: Pass, kept: Mapping[AdapterId, KeptAdapter]
) -> AccumulatedGradients | None:
    """Return where the gradients of a pass are added to; None where that is not asked for.

    Raises RefusedError unless the peer trains the adapter.
    """
    if message.accumulate is None:
        return None
    (one,) = kept.values()  # check_message made sure
    if one.trained is None:
        detail = "this peer was not asked to train the adapter"
        raise RefusedError(ErrorCode.BAD_VALUES, detail)
    return one.trained.accumulated


def cut_adapters(message: Pass, kept: Mapping[AdapterId, KeptAdapter]) -> Adapters:
    """Return what the adapters of a pass have for its blocks, row by row."""
    found = {name: one.adapter.cut(message.span) for name, one in kept.items()}
    return tuple(found.get(run.adapter) for run in message.adapters for _ in range(run.num_rows))


def check_adapters(message: Pass, adapters: Adapters, width: int, most_bytes: int) -> int:
    """Return the bytes that a pass needs for its adapters.

    Raises RefusedError when their gradients do not fill as many vectors as the client expects, or
    take more than `most_bytes`, however few texts there are: on the way there already, if they will
    be asked for.
    """
    wants_gradients = message.adapter_vectors > 0 or message.accumulate is not None
    if not wants_gradients and not message.trains_adapters:
        return 0
    num_numbers = sum(adapter.num_numbers for adapter in _list(adapters))
    if message.adapter_vectors and -(-num_numbers // width) != message.adapter_vectors:
        raise RefusedError(
            ErrorCode.BAD_VALUES,
            f"the gradients of these adapters are {num_numbers} numbers for blocks {message.span}, "
            f"which do not fill {message.adapter_vectors} vectors of {width}",
        )
    check_trained(num_numbers, most_bytes)
    # Copies of the matrices, and their gradients.
    return 2 * num_numbers * _FLOAT_BYTES if wants_gradients else 0


def check_trained(num_numbers: int, most_bytes: int) -> None:
    """Raise RefusedError where the gradients of so many numbers of adapters take too much memory.

    No microbatch makes them smaller, and asking again does not help.
    """
    if num_numbers * _FLOAT_BYTES > most_bytes:
        raise RefusedError(
            ErrorCode.NO_ROOM_FOR_ADAPTER,
            f"this peer has memory to train {most_bytes // _FLOAT_BYTES:,} numbers of adapters at "
            f"once, and its blocks have {num_numbers:,} of them; train a smaller rank or fewer "
            "modules",
        )


def count_cost(asked: WireWork, block_bytes: int) -> int:
    """Return the cost of a pass, see `PassJob`, where the weights of a block take so many bytes."""
    message, num_bytes = asked.message, block_bytes * len(asked.message.span)
    adapters = [adapter for adapter in asked.adapters if adapter is not None]
    num_rows = message.num_rows - len(adapters)
    num_rows += sum(count_token_cost(adapter.num_numbers, num_bytes) for adapter in adapters)
    return round(num_rows * message.num_tokens * len(message.span) * _COSTS[message.kind])


def run_pass(passes: SpanPasses, asked: WireWork, give_way: GiveWay) -> list[bytes]:
    """Return the frames that answer a pass, but for the last.

    On the compute thread: to decode and encode megabytes would hold up the event loop.
    """
    message, tensors, adapters = asked.message, asked.tensors, asked.adapters
    shape = (message.num_rows, message.num_tokens, asked.hidden_size)
    hidden_BTH = _join(tensors.pop(Slot.HIDDEN), give_way).view(shape)
    prompts = _read_prompts(message, tensors, give_way)
    wants_adapters = message.adapter_vectors > 0 or asked.accumulated is not None
    work = PassWork(message.span, hidden_BTH, prompts, adapters, wants_adapters)
    if message.kind is PassKind.FORWARD:
        return _encode(message, Slot.HIDDEN, passes.run_forward(work, give_way), give_way)
    grads_BTH = _join(tensors.pop(Slot.GRADIENTS), give_way).view(shape)
    gradients = passes.run_backward(work, grads_BTH, give_way)
    frames = _encode(message, Slot.HIDDEN, gradients.hidden_BTH, give_way)
    if gradients.prompts_LBPH is not None:
        frames += _encode(message, Slot.PROMPTS, gradients.prompts_LBPH, give_way)
    if message.accumulate is not None and asked.accumulated is not None:
        (found,) = gradients.adapters.values()  # only one is trained
        asked.accumulated.add(message.accumulate, found, give_way)
    elif wants_adapters:
        vectors = _join_gradients(adapters, gradients.adapters, asked.hidden_size)
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


def _join_gradients(
    adapters: Adapters, gradients: Mapping[Adapter, Mapping[str, Tensor]], width: int
) -> Tensor:
    """Return gradients one behind the other, [N, H]: by adapter, as rows name them, and by name.

    The last vector is filled up with zeros.
    """
    flat = [
        matrix.reshape(-1)
        for adapter in _list(adapters)
        for _, matrix in sorted(gradients[adapter].items())
    ]
    joined = torch.cat(flat)
    return F.pad(joined, (0, -len(joined) % width)).view(-1, width)


def _list(adapters: Adapters) -> Sequence[Adapter]:
    return [adapter for adapter in dict.fromkeys(adapters) if adapter is not None]
