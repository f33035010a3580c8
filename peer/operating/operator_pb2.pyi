from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetLimitsRequest(_message.Message):
    __slots__ = ("limits",)
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    limits: Limits
    def __init__(self, limits: _Optional[_Union[Limits, _Mapping]] = ...) -> None: ...

class SetLimitsReply(_message.Message):
    __slots__ = ("peer", "notes")
    PEER_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    peer: PeerDescription
    notes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, peer: _Optional[_Union[PeerDescription, _Mapping]] = ..., notes: _Optional[_Iterable[str]] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("sessions", "kv_memory", "training_memory", "adapter_memory", "upload", "download", "hours")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    KV_MEMORY_FIELD_NUMBER: _ClassVar[int]
    TRAINING_MEMORY_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_MEMORY_FIELD_NUMBER: _ClassVar[int]
    UPLOAD_FIELD_NUMBER: _ClassVar[int]
    DOWNLOAD_FIELD_NUMBER: _ClassVar[int]
    HOURS_FIELD_NUMBER: _ClassVar[int]
    sessions: int
    kv_memory: int
    training_memory: int
    adapter_memory: int
    upload: int
    download: int
    hours: str
    def __init__(self, sessions: _Optional[int] = ..., kv_memory: _Optional[int] = ..., training_memory: _Optional[int] = ..., adapter_memory: _Optional[int] = ..., upload: _Optional[int] = ..., download: _Optional[int] = ..., hours: _Optional[str] = ...) -> None: ...

class PeerDescription(_message.Message):
    __slots__ = ("name", "peer_id", "software", "model", "model_id", "span", "num_blocks", "state", "paused_because", "sessions", "passes", "free_kv_tokens", "limits", "used", "resident_bytes", "decode_steps_per_second", "queue_seconds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    SPAN_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PAUSED_BECAUSE_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    PASSES_FIELD_NUMBER: _ClassVar[int]
    FREE_KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEPS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    peer_id: str
    software: str
    model: str
    model_id: str
    span: str
    num_blocks: int
    state: str
    paused_because: _containers.RepeatedScalarFieldContainer[str]
    sessions: int
    passes: int
    free_kv_tokens: int
    limits: Limits
    used: Limits
    resident_bytes: int
    decode_steps_per_second: float
    queue_seconds: float
    def __init__(self, name: _Optional[str] = ..., peer_id: _Optional[str] = ..., software: _Optional[str] = ..., model: _Optional[str] = ..., model_id: _Optional[str] = ..., span: _Optional[str] = ..., num_blocks: _Optional[int] = ..., state: _Optional[str] = ..., paused_because: _Optional[_Iterable[str]] = ..., sessions: _Optional[int] = ..., passes: _Optional[int] = ..., free_kv_tokens: _Optional[int] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., used: _Optional[_Union[Limits, _Mapping]] = ..., resident_bytes: _Optional[int] = ..., decode_steps_per_second: _Optional[float] = ..., queue_seconds: _Optional[float] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("time", "name", "facts")
    TIME_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    time: float
    name: str
    facts: str
    def __init__(self, time: _Optional[float] = ..., name: _Optional[str] = ..., facts: _Optional[str] = ...) -> None: ...

class WatchReply(_message.Message):
    __slots__ = ("peer", "events")
    PEER_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    peer: PeerDescription
    events: _containers.RepeatedCompositeFieldContainer[Event]
    def __init__(self, peer: _Optional[_Union[PeerDescription, _Mapping]] = ..., events: _Optional[_Iterable[_Union[Event, _Mapping]]] = ...) -> None: ...
