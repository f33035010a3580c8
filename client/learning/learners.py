"""What learns in a run, beside frozen blocks on other machines: prompts, or an adapter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..finetune.lora import LoraAdapter
from ..model import DistributedCausalLM
from .batches import Batch
from .finetune_run import Learner

METHODS = ("lora", "ptune", "deep_ptune")


class PromptLearner:
    """Prompts that a model was opened with."""

    def __init__(self, model: DistributedCausalLM) -> None:
        self._model = model

    @property
    def facts(self) -> Mapping[str, Any]:
        config = self._model.config
        return {
            "model": _name_model(self._model),
            "method": config.tuning_mode,
            "length of prompts": config.pre_seq_len,
        }

    def named_parameters(self) -> Mapping[str, nn.Parameter]:
        named = self._model.named_parameters()
        return {name: parameter for name, parameter in named if parameter.requires_grad}

    def compute_loss(self, batch: Batch) -> Tensor:
        return _compute_loss(self._model, batch)

    def save(self, folder: Path) -> None:
        self._model.save_pretrained(folder)

    def load(self, folder: Path) -> None:
        self._model.load_trained(folder)


class AdapterLearner:
    """A LoRA adapter that peers apply."""

    def __init__(self, model: DistributedCausalLM, adapter: LoraAdapter) -> None:
        self._model = model
        self._adapter = adapter

    @property
    def facts(self) -> Mapping[str, Any]:
        config = self._adapter.lora_config
        return {
            "model": _name_model(self._model),
            "method": "lora",
            "rank": config.rank,
            "alpha": config.alpha,
            "matrices": len(self._adapter.named_matrices()),
        }

    def named_parameters(self) -> Mapping[str, nn.Parameter]:
        return self._adapter.named_matrices()

    def compute_loss(self, batch: Batch) -> Tensor:
        with self._model.use_adapter(self._adapter):
            return _compute_loss(self._model, batch)

    def save(self, folder: Path) -> None:
        self._adapter.save(folder)

    def load(self, folder: Path) -> None:
        loaded = LoraAdapter.load(folder, self._model)
        self._adapter.load_state_dict(loaded.state_dict())


def make_learner(
    model: DistributedCausalLM, rank: int, alpha: float, target_modules: list[str], seed: int
) -> Learner:
    """Return what learns: the prompts that a model was opened with, or else a new adapter."""
    if model.config.tuning_mode is not None:
        return PromptLearner(model)
    adapter = LoraAdapter.create(
        model, rank=rank, alpha=alpha, target_modules=target_modules or "all-linear", seed=seed
    )
    return AdapterLearner(model, adapter)


def _name_model(model: DistributedCausalLM) -> str:
    """Return the end of a path or of an id on the Hub: the same model may lie in another folder."""
    return Path(model.config.name_or_path).name


def _compute_loss(model: DistributedCausalLM, batch: Batch) -> Tensor:
    output: Any = model(
        batch.input_ids_BT, attention_mask=batch.attention_mask_BT, labels=batch.labels_BT
    )
    return output.loss
