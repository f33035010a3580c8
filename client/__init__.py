"""The Python interface of shoal: models, LoRA adapters, errors and configurations.

This file only exports. `model/` stands on `session/` (generating) and `passes/` (fine-tuning), both
on `routing/`; `runtime/` builds a client. A program on top of a client gets a package of its own
beside these: a page of a swarm monitor goes to `monitor/`, an HTTP interface to `gateway/` (neither
exists yet). Nothing here imports `peer` or `cli`, and no network library is loaded before a swarm
is joined. Read first: runtime/async_client.py for a client, model/auto.py for the models.
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
from .settings.client_config import ClientConfig
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
