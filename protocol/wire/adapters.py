"""What is said about adapters as frames and back: see `wire` for the other messages."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..ids import AdapterId, PassId, SessionId, UploadId
from ..messages.adapters import (
    AdapterFetch,
    AdapterHead,
    AdapterKept,
    AdapterMeasure,
    AdapterMeasured,
    AdapterPiece,
    AdapterRows,
    AdapterUpdate,
    AdapterWithdrawal,
    GatherOrder,
    GradientSum,
    OptimizerKind,
    OptimizerSettings,
)
from ..proto import wire_pb2 as pb
from .frames import Kind, Parts


def encode_adapter_rows(adapters: Sequence[AdapterRows]) -> list[pb.AdapterRowsBody]:
    """Return which rows have which adapter, for a body that says so."""
    return [pb.AdapterRowsBody(adapter=one.adapter, num_rows=one.num_rows) for one in adapters]


def decode_adapter_rows(bodies: Iterable[pb.AdapterRowsBody]) -> tuple[AdapterRows, ...]:
    """Return the same from such a body."""
    return tuple(AdapterRows(AdapterId(body.adapter), body.num_rows) for body in bodies)


def encode_head(message: AdapterHead) -> Parts:
    """Return the fields of the frame; the safetensors follow in others."""
    body = pb.AdapterHeadBody(
        adapter=message.adapter,
        config=message.config,
        num_bytes=message.num_bytes,
        is_published=message.is_published,
        replaces=message.replaces,
        optimizer=message.optimizer,
        num_updates=message.num_updates,
        num_trained=message.num_trained,
    )
    return Parts(Kind.ADAPTER_HEAD, message.upload_id, control=body.SerializeToString())


def decode_head(parts: Parts) -> AdapterHead:
    """Return the adapter that a stranger brings; raises ValueError or protobuf's DecodeError."""
    body = pb.AdapterHeadBody()
    body.ParseFromString(bytes(parts.control))
    return AdapterHead(
        UploadId(SessionId(parts.session)),
        AdapterId(body.adapter),
        body.config,
        body.num_bytes,
        body.is_published,
        AdapterId(body.replaces),
        OptimizerKind(body.optimizer),
        body.num_updates,
        body.num_trained,
    )


def encode_adapter_piece(message: AdapterPiece) -> Parts:
    """Return the fields of the frame."""
    body = pb.AdapterPieceBody(data=message.data)
    return Parts(
        Kind.ADAPTER_PIECE,
        message.upload_id,
        position=message.offset,
        control=body.SerializeToString(),
    )


def decode_adapter_piece(parts: Parts) -> AdapterPiece:
    """Return some bytes of an adapter; raises protobuf's DecodeError."""
    body = pb.AdapterPieceBody()
    body.ParseFromString(bytes(parts.control))
    return AdapterPiece(UploadId(SessionId(parts.session)), parts.position, body.data)


def encode_kept(message: AdapterKept) -> Parts:
    """Return the fields of the frame."""
    body = pb.AdapterKeptBody(keep_seconds=message.keep_seconds)
    return Parts(Kind.ADAPTER_KEPT, message.upload_id, control=body.SerializeToString())


def decode_kept(parts: Parts) -> AdapterKept:
    """Return for how long the adapter is kept; raises protobuf's DecodeError."""
    body = pb.AdapterKeptBody()
    body.ParseFromString(bytes(parts.control))
    return AdapterKept(UploadId(SessionId(parts.session)), body.keep_seconds)


def encode_gather(order: GatherOrder | None) -> pb.GatherBody | None:
    """Return which sum a pass adds to, for a body that says so."""
    if order is None:
        return None
    return pb.GatherBody(number=order.number, part=order.part, scale=order.scale)


def decode_gather(body: pb.GatherBody) -> GatherOrder:
    """Return the same from such a body."""
    return GatherOrder(body.number, body.part, body.scale)


def _encode_sum(gradients: GradientSum) -> pb.GradientSumBody:
    return pb.GradientSumBody(
        adapter=gradients.adapter, number=gradients.number, parts=gradients.parts
    )


def _decode_sum(body: pb.GradientSumBody) -> GradientSum:
    return GradientSum(AdapterId(body.adapter), body.number, tuple(body.parts))


def _read_id(parts: Parts) -> PassId:
    return PassId(SessionId(parts.session))


def encode_measure(message: AdapterMeasure) -> Parts:
    """Return the fields of the frame."""
    body = pb.AdapterMeasureBody(gradients=_encode_sum(message.gradients))
    return Parts(Kind.ADAPTER_MEASURE, message.pass_id, control=body.SerializeToString())


def decode_measure(parts: Parts) -> AdapterMeasure:
    """Return which gradients are to be measured; raises protobuf's DecodeError."""
    body = pb.AdapterMeasureBody()
    body.ParseFromString(bytes(parts.control))
    return AdapterMeasure(_read_id(parts), _decode_sum(body.gradients))


def encode_measured(message: AdapterMeasured) -> Parts:
    """Return the fields of the frame."""
    body = pb.AdapterMeasuredBody(square_sum=message.square_sum)
    return Parts(Kind.ADAPTER_MEASURED, message.pass_id, control=body.SerializeToString())


def decode_measured(parts: Parts) -> AdapterMeasured:
    """Return how large gradients are; raises protobuf's DecodeError."""
    body = pb.AdapterMeasuredBody()
    body.ParseFromString(bytes(parts.control))
    return AdapterMeasured(_read_id(parts), body.square_sum)


def encode_update(message: AdapterUpdate) -> Parts:
    """Return the fields of the frame."""
    settings = message.settings
    body = pb.AdapterUpdateBody(
        gradients=_encode_sum(message.gradients),
        factor=message.factor,
        optimizer=settings.kind,
        learning_rate=settings.learning_rate,
        weight_decay=settings.weight_decay,
        momentum=settings.momentum,
        beta1=settings.beta1,
        beta2=settings.beta2,
        epsilon=settings.epsilon,
    )
    return Parts(Kind.ADAPTER_UPDATE, message.pass_id, control=body.SerializeToString())


def decode_update(parts: Parts) -> AdapterUpdate:
    """Return the update that a stranger asks for; raises ValueError or protobuf's DecodeError."""
    body = pb.AdapterUpdateBody()
    body.ParseFromString(bytes(parts.control))
    settings = OptimizerSettings(
        OptimizerKind(body.optimizer),
        body.learning_rate,
        body.weight_decay,
        body.momentum,
        body.beta1,
        body.beta2,
        body.epsilon,
    )
    return AdapterUpdate(_read_id(parts), _decode_sum(body.gradients), settings, body.factor)


def encode_fetch(message: AdapterFetch) -> Parts:
    """Return the fields of the frame."""
    body = pb.AdapterFetchBody(adapter=message.adapter)
    return Parts(Kind.ADAPTER_FETCH, message.pass_id, control=body.SerializeToString())


def decode_fetch(parts: Parts) -> AdapterFetch:
    """Return which adapter is asked for; raises protobuf's DecodeError."""
    body = pb.AdapterFetchBody()
    body.ParseFromString(bytes(parts.control))
    return AdapterFetch(_read_id(parts), AdapterId(body.adapter))


def encode_withdrawal(message: AdapterWithdrawal) -> Parts:
    """Return the fields of the frame."""
    body = pb.AdapterWithdrawalBody(adapter=message.adapter)
    return Parts(Kind.ADAPTER_WITHDRAWAL, message.pass_id, control=body.SerializeToString())


def decode_withdrawal(parts: Parts) -> AdapterWithdrawal:
    """Return which adapter is to be forgotten; raises protobuf's DecodeError."""
    body = pb.AdapterWithdrawalBody()
    body.ParseFromString(bytes(parts.control))
    return AdapterWithdrawal(_read_id(parts), AdapterId(body.adapter))


TABLE: tuple[tuple[Kind, type, Callable[[Any], Parts], Callable[[Parts], Any]], ...] = (
    (Kind.ADAPTER_HEAD, AdapterHead, encode_head, decode_head),
    (Kind.ADAPTER_KEPT, AdapterKept, encode_kept, decode_kept),
    (Kind.ADAPTER_MEASURE, AdapterMeasure, encode_measure, decode_measure),
    (Kind.ADAPTER_MEASURED, AdapterMeasured, encode_measured, decode_measured),
    (Kind.ADAPTER_UPDATE, AdapterUpdate, encode_update, decode_update),
    (Kind.ADAPTER_FETCH, AdapterFetch, encode_fetch, decode_fetch),
    (Kind.ADAPTER_WITHDRAWAL, AdapterWithdrawal, encode_withdrawal, decode_withdrawal),
)
"""Both ways of those whose frames have nothing but an id and a body."""
