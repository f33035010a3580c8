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
from .client import Client
from .config import ClientConfig
from .distributed_config import AutoDistributedConfig
from .finetune.lora import LoraAdapter
from .inference_session import InferenceSession
from .pretrained_block import load_pretrained_block
from .remote_blocks import RemoteSequential
from .remote_cache import RemoteCache as RemotePastKeyValues
from .remote_sequence import UID_DELIMITER, RemoteSequenceManager

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
