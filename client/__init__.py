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
from .model.auto import (
    AutoDistributedModel,
    AutoDistributedModelForCausalLM,
    AutoDistributedModelForSequenceClassification,
    AutoDistributedSpeculativeModel,
    DistributedBloomConfig,
    DistributedBloomForCausalLM,
    DistributedBloomForSequenceClassification,
    DistributedBloomModel,
    DistributedFalconConfig,
    DistributedFalconForCausalLM,
    DistributedFalconForSequenceClassification,
    DistributedFalconModel,
    DistributedLlamaConfig,
    DistributedLlamaForCausalLM,
    DistributedLlamaForSequenceClassification,
    DistributedLlamaForSpeculativeGeneration,
    DistributedLlamaModel,
    DistributedMixtralConfig,
    DistributedMixtralForCausalLM,
    DistributedMixtralForSequenceClassification,
    DistributedMixtralModel,
)
from .model.distributed_config import AutoDistributedConfig
from .model.pretrained_block import load_pretrained_block
from .model.remote_blocks import RemoteSequential
from .model.remote_cache import RemoteCache as RemotePastKeyValues
from .model.remote_sequence import UID_DELIMITER, RemoteSequenceManager
from .runtime.client import Client
from .session.inference_session import InferenceSession
from .settings.config import ClientConfig
from .training.lora import LoraAdapter

__all__ = [
    "UID_DELIMITER",
    "AutoDistributedConfig",
    "AutoDistributedModel",
    "AutoDistributedModelForCausalLM",
    "AutoDistributedModelForSequenceClassification",
    "AutoDistributedSpeculativeModel",
    "CacheFullError",
    "Client",
    "ClientConfig",
    "DirectoryError",
    "DistributedBloomConfig",
    "DistributedBloomForCausalLM",
    "DistributedBloomForSequenceClassification",
    "DistributedBloomModel",
    "DistributedFalconConfig",
    "DistributedFalconForCausalLM",
    "DistributedFalconForSequenceClassification",
    "DistributedFalconModel",
    "DistributedLlamaConfig",
    "DistributedLlamaForCausalLM",
    "DistributedLlamaForSequenceClassification",
    "DistributedLlamaForSpeculativeGeneration",
    "DistributedLlamaModel",
    "DistributedMixtralConfig",
    "DistributedMixtralForCausalLM",
    "DistributedMixtralForSequenceClassification",
    "DistributedMixtralModel",
    "InferenceSession",
    "LoraAdapter",
    "ModelError",
    "RefusedError",
    "RemotePastKeyValues",
    "RemoteProtocolError",
    "RemoteSequenceManager",
    "RemoteSequential",
    "RouteError",
    "ShoalError",
    "UnavailableError",
    "UsageError",
    "load_pretrained_block",
]
