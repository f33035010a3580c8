"""What is said about adapters as frames and back: see `wire` for the other messages."""

from collections.abc import Iterable, Sequence

from .adapter_messages import AdapterHead, AdapterKept, AdapterPiece, AdapterRows
from .frames import Kind, Parts
from .ids import AdapterId, SessionId, UploadId
from .proto import wire_pb2 as pb


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
    )
    return Parts(Kind.ADAPTER_HEAD, message.upload_id, control=body.SerializeToString())


def decode_head(parts: Parts) -> AdapterHead:
    """Return the adapter that a stranger brings; raises protobuf's DecodeError."""
    body = pb.AdapterHeadBody()
    body.ParseFromString(bytes(parts.control))
    return AdapterHead(
        UploadId(SessionId(parts.session)),
        AdapterId(body.adapter),
        body.config,
        body.num_bytes,
        body.is_published,
        AdapterId(body.replaces),
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
