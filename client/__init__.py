"""The Python interface of shoal: models, LoRA adapters, errors and configurations.

This file only exports. `model/` stands on `session/` (generating) and `passes/` (fine-tuning), both
on `routing/`; `runtime/` builds a client. A program on top of a client gets a package of its own
beside these: the swarm monitor is in `monitor/`, an HTTP interface goes to `gateway/` (it does not
exist yet). Nothing here imports `peer` or `cli`, no network library is loaded before a swarm is
joined, and torch and transformers, which take seconds, only with the first name that needs them.
Read first: runtime/async_client.py for a client, model/auto.py for the models.
"""

import gc
from importlib import import_module
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
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
    from .model.remote_cache import RemotePastKeyValues
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

_MODULES = {
    "Client": ".runtime.client",
    "ClientConfig": ".settings.client_config",
    "InferenceSession": ".session.inference_session",
    "LoraAdapter": ".training.lora",
    "RemotePastKeyValues": ".model.remote_cache",
    "RemoteSequenceManager": ".model.remote_blocks",
    "RemoteSequential": ".model.remote_blocks",
    "UID_DELIMITER": ".model.remote_blocks",
    "load_pretrained_block": ".model.pretrained_block",
}
"""Where the names are that are not imported at once (PEP 562); all others are in `.model.auto`."""


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Python would look through half a million new objects again and again: a quarter of the time.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        module = import_module(_MODULES.get(name, ".model.auto"), __name__)
    finally:
        if was_enabled:
            gc.enable()
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
