from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class HelloBody(_message.Message):
    __slots__ = ("min_version", "max_version", "software", "client")
    MIN_VERSION_FIELD_NUMBER: _ClassVar[int]
    MAX_VERSION_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    min_version: int
    max_version: int
    software: str
    client: bytes
    def __init__(self, min_version: _Optional[int] = ..., max_version: _Optional[int] = ..., software: _Optional[str] = ..., client: _Optional[bytes] = ...) -> None: ...

class WelcomeBody(_message.Message):
    __slots__ = ("version", "software", "peer_id", "model_id", "span_start", "span_stop", "wall_seconds")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_FIELD_NUMBER: _ClassVar[int]
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    SPAN_START_FIELD_NUMBER: _ClassVar[int]
    SPAN_STOP_FIELD_NUMBER: _ClassVar[int]
    WALL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    version: int
    software: str
    peer_id: str
    model_id: str
    span_start: int
    span_stop: int
    wall_seconds: float
    def __init__(self, version: _Optional[int] = ..., software: _Optional[str] = ..., peer_id: _Optional[str] = ..., model_id: _Optional[str] = ..., span_start: _Optional[int] = ..., span_stop: _Optional[int] = ..., wall_seconds: _Optional[float] = ...) -> None: ...

class OpenBody(_message.Message):
    __slots__ = ("model_id", "span_start", "span_stop", "num_rows", "max_tokens", "dtype", "max_wait_seconds", "kv_format", "parent", "prefix_tokens")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    SPAN_START_FIELD_NUMBER: _ClassVar[int]
    SPAN_STOP_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    MAX_WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    KV_FORMAT_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    PREFIX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    span_start: int
    span_stop: int
    num_rows: int
    max_tokens: int
    dtype: int
    max_wait_seconds: float
    kv_format: int
    parent: bytes
    prefix_tokens: int
    def __init__(self, model_id: _Optional[str] = ..., span_start: _Optional[int] = ..., span_stop: _Optional[int] = ..., num_rows: _Optional[int] = ..., max_tokens: _Optional[int] = ..., dtype: _Optional[int] = ..., max_wait_seconds: _Optional[float] = ..., kv_format: _Optional[int] = ..., parent: _Optional[bytes] = ..., prefix_tokens: _Optional[int] = ...) -> None: ...

class QueuedBody(_message.Message):
    __slots__ = ("wait_seconds",)
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    wait_seconds: float
    def __init__(self, wait_seconds: _Optional[float] = ...) -> None: ...

class OpenedBody(_message.Message):
    __slots__ = ("queue_seconds", "free_kv_tokens")
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FREE_KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    queue_seconds: float
    free_kv_tokens: int
    def __init__(self, queue_seconds: _Optional[float] = ..., free_kv_tokens: _Optional[int] = ...) -> None: ...

class StepBody(_message.Message):
    __slots__ = ("row_map",)
    ROW_MAP_FIELD_NUMBER: _ClassVar[int]
    row_map: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, row_map: _Optional[_Iterable[int]] = ...) -> None: ...

class OutputBody(_message.Message):
    __slots__ = ("queue_seconds", "compute_seconds")
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    queue_seconds: float
    compute_seconds: float
    def __init__(self, queue_seconds: _Optional[float] = ..., compute_seconds: _Optional[float] = ...) -> None: ...

class DeclinedBody(_message.Message):
    __slots__ = ("code", "detail", "retry_after_seconds", "whole_stream")
    CODE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WHOLE_STREAM_FIELD_NUMBER: _ClassVar[int]
    code: int
    detail: str
    retry_after_seconds: float
    whole_stream: bool
    def __init__(self, code: _Optional[int] = ..., detail: _Optional[str] = ..., retry_after_seconds: _Optional[float] = ..., whole_stream: _Optional[bool] = ...) -> None: ...
