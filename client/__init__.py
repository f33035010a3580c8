"""What a Python user imports. Cheap: the network libraries are loaded when a swarm is joined."""

from ..protocol.errors import (
    CacheFullError,
    DirectoryError,
    ModelError,
    RefusedError,
    RemoteProtocolError,
    RouteError,
    ShoalError,
    UnavailableError,
    UsageError,
)
from .auto import (
    AutoDistributedModel,
    AutoDistributedModelForCausalLM,
    AutoDistributedModelForSequenceClassification,
    AutoDistributedSpeculativeModel,
)
from .client import Client
from .config import ClientConfig
from .distributed_config import AutoDistributedConfig
from .finetune.lora import LoraAdapter
from .inference_session import InferenceSession
from .remote_blocks import RemoteSequential

__all__ = [
    "AutoDistributedConfig",
    "AutoDistributedModel",
    "AutoDistributedModelForCausalLM",
    "AutoDistributedModelForSequenceClassification",
    "AutoDistributedSpeculativeModel",
    "CacheFullError",
    "Client",
    "ClientConfig",
    "DirectoryError",
    "InferenceSession",
    "LoraAdapter",
    "ModelError",
    "RefusedError",
    "RemoteProtocolError",
    "RemoteSequential",
    "RouteError",
    "ShoalError",
    "UnavailableError",
    "UsageError",
]
