"""The classes with the names of PETALS; each opens one kind of model over a swarm.

One class of each kind serves all families. The classes with a family in their name add nothing:
they are there for scripts that name, compare or extend them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

    @classmethod
    def _find_kind(cls, model_type: str) -> type[Self]:
        """Return the class of the family, if it has one of this kind."""
        kinds = _OF_FAMILIES.get(model_type, ())
        return next((kind for kind in kinds if issubclass(kind, cls)), cls)


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


class DistributedBloomConfig(AutoDistributedConfig):
    """Configurations under the name that BLOOM's have in PETALS."""


class DistributedBloomModel(AutoDistributedModel):
    """BLOOM models without a head."""


class DistributedBloomForCausalLM(AutoDistributedModelForCausalLM):
    """BLOOM causal language models."""


class DistributedBloomForSequenceClassification(AutoDistributedModelForSequenceClassification):
    """BLOOM text classifiers."""


class DistributedFalconConfig(AutoDistributedConfig):
    """Configurations under the name that Falcon's have in PETALS."""


class DistributedFalconModel(AutoDistributedModel):
    """Falcon models without a head."""


class DistributedFalconForCausalLM(AutoDistributedModelForCausalLM):
    """Falcon causal language models."""


class DistributedFalconForSequenceClassification(AutoDistributedModelForSequenceClassification):
    """Falcon text classifiers."""


class DistributedLlamaConfig(AutoDistributedConfig):
    """Configurations under the name that Llama's have in PETALS."""


class DistributedLlamaModel(AutoDistributedModel):
    """Llama models without a head."""


class DistributedLlamaForCausalLM(AutoDistributedModelForCausalLM):
    """Llama causal language models."""


class DistributedLlamaForSequenceClassification(AutoDistributedModelForSequenceClassification):
    """Llama text classifiers."""


class DistributedLlamaForSpeculativeGeneration(AutoDistributedSpeculativeModel):
    """Llama models for speculative decoding."""


class DistributedMixtralConfig(AutoDistributedConfig):
    """Configurations under the name that Mixtral's have in PETALS."""


class DistributedMixtralModel(AutoDistributedModel):
    """Mixtral models without a head."""


class DistributedMixtralForCausalLM(AutoDistributedModelForCausalLM):
    """Mixtral causal language models."""


class DistributedMixtralForSequenceClassification(AutoDistributedModelForSequenceClassification):
    """Mixtral text classifiers."""


_OF_FAMILIES: Mapping[str, tuple[type[Any], ...]] = {
    "bloom": (
        DistributedBloomModel,
        DistributedBloomForCausalLM,
        DistributedBloomForSequenceClassification,
    ),
    "falcon": (
        DistributedFalconModel,
        DistributedFalconForCausalLM,
        DistributedFalconForSequenceClassification,
    ),
    "llama": (
        DistributedLlamaModel,
        DistributedLlamaForCausalLM,
        DistributedLlamaForSequenceClassification,
        DistributedLlamaForSpeculativeGeneration,
    ),
    "mixtral": (
        DistributedMixtralModel,
        DistributedMixtralForCausalLM,
        DistributedMixtralForSequenceClassification,
    ),
}
"""The classes of families by the model type of their configuration."""
