"""The classes with the names of PETALS; each opens one kind of model over a swarm.

PETALS has one class of each kind for every family. Here one class serves all families.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..runtime.client import Connect, find_network, make_join
from ..settings.client_config import make_client_config
from .causal_lm import DistributedCausalLM, SpeculativeCausalLM
from .headless_model import DistributedSequenceClassifier, HeadlessModel
from .local_layers import open_checkpoint
from .remote_blocks import DistributedConfig


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


class AutoDistributedModelForCausalLM:
    """Opens causal language models; never instantiated."""

    @staticmethod
    def from_pretrained(
        model: str | Path, *, connect: Connect = find_network, **options: Any
    ) -> DistributedCausalLM:
        """Open a model and join its swarm: see DistributedModel.from_pretrained().

        `connect` returns the network; that of `LoopbackSwarm` needs no initial peers.
        """
        return DistributedCausalLM.from_pretrained(model, join_swarm=make_join(connect), **options)


class AutoDistributedModelForSequenceClassification:
    """Opens text classifiers; never instantiated."""

    @staticmethod
    def from_pretrained(
        model: str | Path, *, connect: Connect = find_network, **options: Any
    ) -> DistributedSequenceClassifier:
        """Open a model with a head for `num_labels` classes and join its swarm.

        `problem_type` is one of those of transformers; without it, it is inferred from the labels,
        as in transformers. `connect` is that of AutoDistributedModelForCausalLM; for everything
        else see DistributedModel.from_pretrained().
        """
        return DistributedSequenceClassifier.from_pretrained(
            model, join_swarm=make_join(connect), **options
        )


class AutoDistributedModel:
    """Opens models without a head; never instantiated."""

    @staticmethod
    def from_pretrained(
        model: str | Path, *, connect: Connect = find_network, **options: Any
    ) -> HeadlessModel:
        """Open a model and join its swarm: see DistributedModel.from_pretrained().

        `connect` returns the network; that of `LoopbackSwarm` needs no initial peers.
        """
        return HeadlessModel.from_pretrained(model, join_swarm=make_join(connect), **options)


class AutoDistributedSpeculativeModel:
    """Opens models for speculative decoding with a small local model; never instantiated."""

    @staticmethod
    def from_pretrained(
        model: str | Path,
        *,
        small_model: PreTrainedModel,
        connect: Connect = find_network,
        **options: Any,
    ) -> SpeculativeCausalLM:
        """Open a model and join its swarm: see SpeculativeCausalLM.from_pretrained().

        `connect` is that of AutoDistributedModelForCausalLM.
        """
        return SpeculativeCausalLM.from_pretrained(
            model, small_model=small_model, join_swarm=make_join(connect), **options
        )


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
