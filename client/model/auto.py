"""The classes with the names of PETALS; each opens one kind of model over a swarm.

PETALS has one class of each kind for every family. Here one class serves all families.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from .distributed_config import AutoDistributedConfig
from .headless_model import DistributedSequenceClassifier, HeadlessModel
from .model import DistributedCausalLM
from .speculative_model import SpeculativeCausalLM


class AutoDistributedModelForCausalLM:
    """Opens causal language models; never instantiated."""

    @staticmethod
    def from_pretrained(model: str | Path, **options: Any) -> DistributedCausalLM:
        """Open a model and join its swarm: see DistributedModel.from_pretrained()."""
        return DistributedCausalLM.from_pretrained(model, **options)


class AutoDistributedModelForSequenceClassification:
    """Opens text classifiers; never instantiated."""

    @staticmethod
    def from_pretrained(model: str | Path, **options: Any) -> DistributedSequenceClassifier:
        """Open a model with a head for `num_labels` classes and join its swarm.

        `problem_type` is one of those of transformers; without it, it is inferred from the labels,
        as in transformers. For everything else see DistributedModel.from_pretrained().
        """
        return DistributedSequenceClassifier.from_pretrained(model, **options)


class AutoDistributedModel:
    """Opens models without a head; never instantiated."""

    @staticmethod
    def from_pretrained(model: str | Path, **options: Any) -> HeadlessModel:
        """Open a model and join its swarm: see DistributedModel.from_pretrained()."""
        return HeadlessModel.from_pretrained(model, **options)


class AutoDistributedSpeculativeModel:
    """Opens models for speculative decoding with a small local model; never instantiated."""

    @staticmethod
    def from_pretrained(
        model: str | Path, *, small_model: PreTrainedModel, **options: Any
    ) -> SpeculativeCausalLM:
        """Open a model and join its swarm: see SpeculativeCausalLM.from_pretrained()."""
        return SpeculativeCausalLM.from_pretrained(model, small_model=small_model, **options)


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
