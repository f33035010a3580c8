from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

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
    __slots__ = ("version", "software", "peer_id", "model_id", "span_start", "span_stop", "wall_seconds", "nonce")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_FIELD_NUMBER: _ClassVar[int]
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    SPAN_START_FIELD_NUMBER: _ClassVar[int]
    SPAN_STOP_FIELD_NUMBER: _ClassVar[int]
    WALL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    version: int
    software: str
    peer_id: str
    model_id: str
    span_start: int
    span_stop: int
    wall_seconds: float
    nonce: bytes
    def __init__(self, version: _Optional[int] = ..., software: _Optional[str] = ..., peer_id: _Optional[str] = ..., model_id: _Optional[str] = ..., span_start: _Optional[int] = ..., span_stop: _Optional[int] = ..., wall_seconds: _Optional[float] = ..., nonce: _Optional[bytes] = ...) -> None: ...

class OpenBody(_message.Message):
    __slots__ = ("model_id", "span_start", "span_stop", "num_rows", "max_tokens", "dtype", "max_wait_seconds", "kv_format", "parent", "prefix_tokens", "capability", "next", "adapter", "prompt_tokens", "prompt_rows")
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
    CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ROWS_FIELD_NUMBER: _ClassVar[int]
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
    capability: bytes
    next: NextHopBody
    adapter: bytes
    prompt_tokens: int
    prompt_rows: int
    def __init__(self, model_id: _Optional[str] = ..., span_start: _Optional[int] = ..., span_stop: _Optional[int] = ..., num_rows: _Optional[int] = ..., max_tokens: _Optional[int] = ..., dtype: _Optional[int] = ..., max_wait_seconds: _Optional[float] = ..., kv_format: _Optional[int] = ..., parent: _Optional[bytes] = ..., prefix_tokens: _Optional[int] = ..., capability: _Optional[bytes] = ..., next: _Optional[_Union[NextHopBody, _Mapping]] = ..., adapter: _Optional[bytes] = ..., prompt_tokens: _Optional[int] = ..., prompt_rows: _Optional[int] = ...) -> None: ...

class EndpointBody(_message.Message):
    __slots__ = ("host", "port", "fingerprint")
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    host: str
    port: int
    fingerprint: str
    def __init__(self, host: _Optional[str] = ..., port: _Optional[int] = ..., fingerprint: _Optional[str] = ...) -> None: ...

class NextHopBody(_message.Message):
    __slots__ = ("peer_id", "endpoints", "session", "epoch", "capability", "first_sequence")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    FIRST_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    endpoints: _containers.RepeatedCompositeFieldContainer[EndpointBody]
    session: bytes
    epoch: int
    capability: bytes
    first_sequence: int
    def __init__(self, peer_id: _Optional[str] = ..., endpoints: _Optional[_Iterable[_Union[EndpointBody, _Mapping]]] = ..., session: _Optional[bytes] = ..., epoch: _Optional[int] = ..., capability: _Optional[bytes] = ..., first_sequence: _Optional[int] = ...) -> None: ...

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
    __slots__ = ("row_map", "before_seconds")
    ROW_MAP_FIELD_NUMBER: _ClassVar[int]
    BEFORE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    row_map: _containers.RepeatedScalarFieldContainer[int]
    before_seconds: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, row_map: _Optional[_Iterable[int]] = ..., before_seconds: _Optional[_Iterable[float]] = ...) -> None: ...

class OutputBody(_message.Message):
    __slots__ = ("queue_seconds", "compute_seconds", "before_seconds")
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BEFORE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    queue_seconds: float
    compute_seconds: float
    before_seconds: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, queue_seconds: _Optional[float] = ..., compute_seconds: _Optional[float] = ..., before_seconds: _Optional[_Iterable[float]] = ...) -> None: ...

class CapabilityBody(_message.Message):
    __slots__ = ("capability",)
    CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    capability: bytes
    def __init__(self, capability: _Optional[bytes] = ...) -> None: ...

class RedirectBody(_message.Message):
    __slots__ = ("next",)
    NEXT_FIELD_NUMBER: _ClassVar[int]
    next: NextHopBody
    def __init__(self, next: _Optional[_Union[NextHopBody, _Mapping]] = ...) -> None: ...

class StatusBody(_message.Message):
    __slots__ = ("done_sequence", "num_replayed")
    DONE_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    NUM_REPLAYED_FIELD_NUMBER: _ClassVar[int]
    done_sequence: int
    num_replayed: int
    def __init__(self, done_sequence: _Optional[int] = ..., num_replayed: _Optional[int] = ...) -> None: ...

class PassBody(_message.Message):
    __slots__ = ("kind", "model_id", "span_start", "span_stop", "num_rows", "num_tokens", "dtype", "prompt_rows", "prompt_tokens", "adapters", "adapter_vectors", "gather", "trains_adapters")
    KIND_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    SPAN_START_FIELD_NUMBER: _ClassVar[int]
    SPAN_STOP_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ROWS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_VECTORS_FIELD_NUMBER: _ClassVar[int]
    GATHER_FIELD_NUMBER: _ClassVar[int]
    TRAINS_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    kind: int
    model_id: str
    span_start: int
    span_stop: int
    num_rows: int
    num_tokens: int
    dtype: int
    prompt_rows: int
    prompt_tokens: int
    adapters: _containers.RepeatedCompositeFieldContainer[AdapterRowsBody]
    adapter_vectors: int
    gather: GatherBody
    trains_adapters: bool
    def __init__(self, kind: _Optional[int] = ..., model_id: _Optional[str] = ..., span_start: _Optional[int] = ..., span_stop: _Optional[int] = ..., num_rows: _Optional[int] = ..., num_tokens: _Optional[int] = ..., dtype: _Optional[int] = ..., prompt_rows: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., adapters: _Optional[_Iterable[_Union[AdapterRowsBody, _Mapping]]] = ..., adapter_vectors: _Optional[int] = ..., gather: _Optional[_Union[GatherBody, _Mapping]] = ..., trains_adapters: _Optional[bool] = ...) -> None: ...

class AdapterRowsBody(_message.Message):
    __slots__ = ("adapter", "num_rows")
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    adapter: bytes
    num_rows: int
    def __init__(self, adapter: _Optional[bytes] = ..., num_rows: _Optional[int] = ...) -> None: ...

class AdapterHeadBody(_message.Message):
    __slots__ = ("adapter", "config", "num_bytes", "is_published", "replaces", "optimizer", "num_updates", "num_trained")
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    IS_PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    REPLACES_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    NUM_UPDATES_FIELD_NUMBER: _ClassVar[int]
    NUM_TRAINED_FIELD_NUMBER: _ClassVar[int]
    adapter: bytes
    config: bytes
    num_bytes: int
    is_published: bool
    replaces: bytes
    optimizer: int
    num_updates: int
    num_trained: int
    def __init__(self, adapter: _Optional[bytes] = ..., config: _Optional[bytes] = ..., num_bytes: _Optional[int] = ..., is_published: _Optional[bool] = ..., replaces: _Optional[bytes] = ..., optimizer: _Optional[int] = ..., num_updates: _Optional[int] = ..., num_trained: _Optional[int] = ...) -> None: ...

class GatherBody(_message.Message):
    __slots__ = ("number", "part", "scale")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    number: int
    part: int
    scale: float
    def __init__(self, number: _Optional[int] = ..., part: _Optional[int] = ..., scale: _Optional[float] = ...) -> None: ...

class GradientSumBody(_message.Message):
    __slots__ = ("adapter", "number", "parts")
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    adapter: bytes
    number: int
    parts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, adapter: _Optional[bytes] = ..., number: _Optional[int] = ..., parts: _Optional[_Iterable[int]] = ...) -> None: ...

class AdapterMeasureBody(_message.Message):
    __slots__ = ("gradients",)
    GRADIENTS_FIELD_NUMBER: _ClassVar[int]
    gradients: GradientSumBody
    def __init__(self, gradients: _Optional[_Union[GradientSumBody, _Mapping]] = ...) -> None: ...

class AdapterMeasuredBody(_message.Message):
    __slots__ = ("square_sum",)
    SQUARE_SUM_FIELD_NUMBER: _ClassVar[int]
    square_sum: float
    def __init__(self, square_sum: _Optional[float] = ...) -> None: ...

class AdapterUpdateBody(_message.Message):
    __slots__ = ("gradients", "factor", "optimizer", "learning_rate", "weight_decay", "momentum", "beta1", "beta2", "epsilon")
    GRADIENTS_FIELD_NUMBER: _ClassVar[int]
    FACTOR_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DECAY_FIELD_NUMBER: _ClassVar[int]
    MOMENTUM_FIELD_NUMBER: _ClassVar[int]
    BETA1_FIELD_NUMBER: _ClassVar[int]
    BETA2_FIELD_NUMBER: _ClassVar[int]
    EPSILON_FIELD_NUMBER: _ClassVar[int]
    gradients: GradientSumBody
    factor: float
    optimizer: int
    learning_rate: float
    weight_decay: float
    momentum: float
    beta1: float
    beta2: float
    epsilon: float
    def __init__(self, gradients: _Optional[_Union[GradientSumBody, _Mapping]] = ..., factor: _Optional[float] = ..., optimizer: _Optional[int] = ..., learning_rate: _Optional[float] = ..., weight_decay: _Optional[float] = ..., momentum: _Optional[float] = ..., beta1: _Optional[float] = ..., beta2: _Optional[float] = ..., epsilon: _Optional[float] = ...) -> None: ...

class AdapterFetchBody(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: bytes
    def __init__(self, adapter: _Optional[bytes] = ...) -> None: ...

class AdapterWithdrawalBody(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: bytes
    def __init__(self, adapter: _Optional[bytes] = ...) -> None: ...

class AdapterPieceBody(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class AdapterKeptBody(_message.Message):
    __slots__ = ("keep_seconds",)
    KEEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    keep_seconds: float
    def __init__(self, keep_seconds: _Optional[float] = ...) -> None: ...

class PassedBody(_message.Message):
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

class OfferBody(_message.Message):
    __slots__ = ("peer_id", "is_bulk", "signature")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    IS_BULK_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    is_bulk: bool
    signature: bytes
    def __init__(self, peer_id: _Optional[str] = ..., is_bulk: _Optional[bool] = ..., signature: _Optional[bytes] = ...) -> None: ...
