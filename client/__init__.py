"""What a Python user imports: models, LoRA adapters, errors and configurations.

Nothing is defined here, and no network library is loaded before a swarm is joined. Read first:
runtime/client.py for a client, model/auto.py for the models.
"""

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
    AutoDistributedConfig,
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
from .model.pretrained_block import load_pretrained_block
from .model.remote_blocks import UID_DELIMITER, RemoteSequenceManager, RemoteSequential
from .model.remote_cache import RemoteCache as RemotePastKeyValues
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
