"""Calls of one method of a peer's operator service, for commands on the same machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc

from ...protocol.errors import ShoalError, UnavailableError, UsageError
from . import operator_pb2

_SERVICE = operator_pb2.DESCRIPTOR.services_by_name["Peer"]

_LATE = "it goes on with it; `shoal peers` shows how far it is"


def call_peer(
    socket: Path, name: str, method: str, timeout_seconds: float, fields: Mapping[str, Any] = {}
) -> dict[str, Any]:
    """Call a method of shoal.operator.v1.Peer that answers once; return the fields of its answer.

    Raises UsageError for what the peer does not accept, UnavailableError where it does not answer.
    """
    found = _SERVICE.methods_by_name[method]
    request = getattr(operator_pb2, found.input_type.name)(**fields)
    answer = getattr(operator_pb2, found.output_type.name)
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        call = channel.unary_unary(
            f"/{_SERVICE.full_name}/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=answer.FromString,
        )
        try:
            return _read(call(request, timeout=timeout_seconds))
        except grpc.RpcError as error:
            raise _make_error(error, name, timeout_seconds) from error


def _make_error(error: Any, name: str, timeout_seconds: float) -> ShoalError:
    code, detail = error.code(), " ".join(error.details().split())
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return UsageError(detail)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        seconds = f"{timeout_seconds:.0f} s"
        return UnavailableError(f"peer {name} has not done it within {seconds}: {_LATE}")
    return UnavailableError(f"peer {name} does not answer: {detail}")


def _read(message: Any) -> dict[str, Any]:
    """Return the fields of a message as Python values, those of messages in it as well."""
    values: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.is_repeated:
            value = list(value)  # of texts: no method that answers once has more
        elif field.message_type is not None:
            value = _read(value)
        values[field.name] = value
    return values
