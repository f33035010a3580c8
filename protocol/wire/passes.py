"""Passes and the pieces of their tensors as frames and back: see `wire` for the other messages."""

from ..ids import ModelId, PassId, SessionId
from ..messages.session import Pass, Passed, PassKind, PassPiece, Slot
from ..proto import wire_pb2 as pb
from ..spans import Span
from ..tensors import WireDtype
from .adapters import decode_adapter_rows, decode_gather, encode_adapter_rows, encode_gather
from .frames import Kind, Parts


def encode_pass(message: Pass) -> Parts:
    """Return the fields of the frame; the tensors follow in others."""
    body = pb.PassBody(
        kind=message.kind,
        model_id=message.model_id,
        span_start=message.span.start,
        span_stop=message.span.stop,
        num_rows=message.num_rows,
        num_tokens=message.num_tokens,
        dtype=message.dtype,
        prompt_rows=message.prompt_rows,
        prompt_tokens=message.prompt_tokens,
        adapters=encode_adapter_rows(message.adapters),
        adapter_vectors=message.adapter_vectors,
        gather=encode_gather(message.gather),
        trains_adapters=message.trains_adapters,
    )
    return Parts(Kind.PASS, message.pass_id, control=body.SerializeToString())


def decode_pass(parts: Parts) -> Pass:
    """Return the pass that a stranger asks for; raises ValueError or protobuf's DecodeError."""
    body = pb.PassBody()
    body.ParseFromString(bytes(parts.control))
    return Pass(
        PassId(SessionId(parts.session)),
        PassKind(body.kind),
        ModelId(body.model_id),
        Span(body.span_start, body.span_stop),
        body.num_rows,
        body.num_tokens,
        WireDtype(body.dtype),
        body.prompt_rows,
        body.prompt_tokens,
        decode_adapter_rows(body.adapters),
        body.adapter_vectors,
        decode_gather(body.gather) if body.HasField("gather") else None,
        body.trains_adapters,
    )


def encode_piece(message: PassPiece) -> Parts:
    """Return the fields of the frame: nothing but header and tensor."""
    return Parts(
        Kind.PASS_PIECE,
        message.pass_id,
        sequence=message.slot,
        position=message.offset,
        tensor=message.tensor,
    )


def decode_piece(parts: Parts) -> PassPiece:
    """Return a piece of a tensor; raises ValueError for an unknown slot."""
    assert parts.tensor is not None  # split_frame made sure
    return PassPiece(
        PassId(SessionId(parts.session)), Slot(parts.sequence), parts.position, parts.tensor
    )


def encode_passed(message: Passed) -> Parts:
    """Return the fields of the frame."""
    body = pb.PassedBody(
        queue_seconds=message.queue_seconds, compute_seconds=message.compute_seconds
    )
    return Parts(Kind.PASSED, message.pass_id, control=body.SerializeToString())


def decode_passed(parts: Parts) -> Passed:
    """Return the end of an answer; raises protobuf's DecodeError."""
    body = pb.PassedBody()
    body.ParseFromString(bytes(parts.control))
    return Passed(PassId(SessionId(parts.session)), body.queue_seconds, body.compute_seconds)
