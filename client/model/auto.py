"""The classes with the names of PETALS; each opens one kind of model over a swarm.

One class of each kind serves all families, also under the names with a family in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from ..runtime.client import Connect, find_network, make_join
from .base_model import DistributedModel
from .causal_lm import DistributedCausalLM, SpeculativeCausalLM
from .distributed_config import DistributedConfig
from .headless_model import DistributedSequenceClassifier, HeadlessModel


class AutoDistributedConfig(DistributedConfig):
    """Configurations of all families."""

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        *,
        initial_peers: Sequence[str] | str | None = (),
        revision: str | None = None,
        connect: Connect = find_network,
        **options: Any,
    ) -> Self:
        """Read the configuration of a model directory or Hub id, for RemoteSequential.

        Arguments and errors are those of AutoDistributedModelForCausalLM.from_pretrained().
        """
        _, config = cls.open(model, make_join(connect), initial_peers, revision, options)
        return config


class _JoiningModel(DistributedModel):
    """A model that joins its swarm by itself."""

    @classmethod
    def from_pretrained(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls, model: str | Path, *, connect: Connect = find_network, **options: Any
    ) -> Self:
        """Open a model and join its swarm: see DistributedModel.from_pretrained().

        `connect` returns the network; that of `LoopbackSwarm` needs no initial peers.
        """
        return super().from_pretrained(model, join_swarm=make_join(connect), **options)


class AutoDistributedModelForCausalLM(_JoiningModel, DistributedCausalLM):
    """Causal language models."""


class AutoDistributedModelForSequenceClassification(_JoiningModel, DistributedSequenceClassifier):
    """Text classifiers.

    Their head has `num_labels` classes. `problem_type` is one of those of transformers; without it,
    it is inferred from the labels, as in transformers.
    """


class AutoDistributedModel(_JoiningModel, HeadlessModel):
    """Models without a head."""


class AutoDistributedSpeculativeModel(_JoiningModel, SpeculativeCausalLM):
    """Models for speculative decoding with `small_model`, a small local one."""


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
