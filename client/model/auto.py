"""The classes with the names of PETALS; each opens one kind of model over a swarm.

PETALS has one class of each kind for every family. Here one class serves all families.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from ..runtime.client import Connect, find_network, make_join
from ..settings.client_config import make_client_config
from .base_model import DistributedModel
from .causal_lm import DistributedCausalLM, SpeculativeCausalLM
from .headless_model import DistributedSequenceClassifier, HeadlessModel
from .local_layers import open_checkpoint
from .remote_blocks import DistributedConfig

Model = TypeVar("Model", bound=DistributedModel)


class AutoDistributedConfig:
    """Opens configurations; never instantiated."""

    @staticmethod
    def from_pretrained(
        model: str | Path,
        *,
        initial_peers: Sequence[str] | str = (),
        revision: str | None = None,
        connect: Connect = find_network,
        **client_config: Any,
    ) -> DistributedConfig:
        """Read the configuration of a model directory or Hub id, for RemoteSequential.

        Arguments and errors are those of AutoDistributedModelForCausalLM.from_pretrained().
        """
        client = make_client_config(initial_peers, client_config)
        _, model_config = open_checkpoint(model, revision)
        return DistributedConfig(model_config, client, make_join(connect))


class _AutoModel(Generic[Model]):
    """Opens models of one kind; never instantiated."""

    _kind: type[Model]

    @classmethod
    def from_pretrained(
        cls, model: str | Path, *, connect: Connect = find_network, **options: Any
    ) -> Model:
        """Open a model and join its swarm: see from_pretrained() of the class that is returned.

        `connect` returns the network; that of `LoopbackSwarm` needs no initial peers.
        """
        return cls._kind.from_pretrained(model, join_swarm=make_join(connect), **options)


class AutoDistributedModelForCausalLM(_AutoModel[DistributedCausalLM]):
    """Opens causal language models."""

    _kind = DistributedCausalLM


class AutoDistributedModelForSequenceClassification(_AutoModel[DistributedSequenceClassifier]):
    """Opens text classifiers.

    Their head has `num_labels` classes. `problem_type` is one of those of transformers; without it,
    it is inferred from the labels, as in transformers.
    """

    _kind = DistributedSequenceClassifier


class AutoDistributedModel(_AutoModel[HeadlessModel]):
    """Opens models without a head."""

    _kind = HeadlessModel


class AutoDistributedSpeculativeModel(_AutoModel[SpeculativeCausalLM]):
    """Opens models for speculative decoding with `small_model`, a small local one."""

    _kind = SpeculativeCausalLM


DistributedBloomConfig = AutoDistributedConfig
DistributedFalconConfig = AutoDistributedConfig
DistributedLlamaConfig = AutoDistributedConfig
DistributedMixtralConfig = AutoDistributedConfig
DistributedBloomModel = AutoDistributedModel
DistributedFalconModel = AutoDistributedModel
DistributedLlamaModel = AutoDistributedModel
DistributedMixtralModel = AutoDistributedModel
DistributedBloomForCausalLM = AutoDistributedModelForCausalLM
DistributedFalconForCausalLM = AutoDistributedModelForCausalLM
DistributedLlamaForCausalLM = AutoDistributedModelForCausalLM
DistributedMixtralForCausalLM = AutoDistributedModelForCausalLM
DistributedBloomForSequenceClassification = AutoDistributedModelForSequenceClassification
DistributedFalconForSequenceClassification = AutoDistributedModelForSequenceClassification
DistributedLlamaForSequenceClassification = AutoDistributedModelForSequenceClassification
DistributedMixtralForSequenceClassification = AutoDistributedModelForSequenceClassification
DistributedLlamaForSpeculativeGeneration = AutoDistributedSpeculativeModel
