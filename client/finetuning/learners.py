"""The trainable parts of a run, beside frozen remote blocks: prompts, or an adapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...protocol.errors import UsageError
from ..model.causal_lm import DistributedCausalLM
from ..training.lora import LoraAdapter
from ..training.peer_optimizer import PeerOptimizer
from .dataset import Batch
from .finetune_run import Learner


class PromptLearner(Learner):
    """Prompts that a model was opened with."""

    def __init__(self, model: DistributedCausalLM) -> None:
        self._model = model

    @property
    def facts(self) -> Mapping[str, Any]:
        config = self._model.config
        return {
            "model": self._model.config.dht_prefix,
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


class AdapterLearner(Learner):
    """A LoRA adapter that peers apply."""

    def __init__(self, model: DistributedCausalLM, adapter: LoraAdapter) -> None:
        self._model = model
        self._adapter = adapter

    @property
    def facts(self) -> Mapping[str, Any]:
        config = self._adapter.lora_config
        return {
            "model": self._model.config.dht_prefix,
            "method": "lora",
            "rank": config.rank,
            "alpha": config.alpha,
            "target modules": ", ".join(_list_ends(self._adapter)),
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
        if loaded.named_matrices().keys() != self._adapter.named_matrices().keys():
            raise UsageError(
                f"the adapter in {folder} has other target modules than this run; --resume needs "
                "the same --target-modules"
            )
        self._adapter.load_state_dict(loaded.state_dict())


class AdapterAtPeersLearner(AdapterLearner):
    """The same, where peers run the optimizer as well."""

    def make_optimizer(self, learning_rate: float, weight_decay: float) -> torch.optim.Optimizer:
        """See `Learner.make_optimizer`."""
        return self._model.optimizer_at_peers(
            self._adapter, "adamw", lr=learning_rate, weight_decay=weight_decay
        )

    def clip_gradients(self, optimizer: torch.optim.Optimizer, max_norm: float) -> float:
        """See `Learner.clip_gradients`."""
        assert isinstance(optimizer, PeerOptimizer)
        return float(optimizer.clip_grad_norm(max_norm))


def make_learner(
    model: DistributedCausalLM,
    *,
    rank: int,
    alpha: float,
    target_modules: Sequence[str] = (),
    seed: int = 0,
    is_trained_at_peers: bool = False,
) -> Learner:
    """Return a learner for the prompts that a model was opened with, or else for a new adapter.

    The optimizer of an adapter that is trained at peers runs there.
    """
    if model.config.tuning_mode is not None:
        return PromptLearner(model)
    targets = list(target_modules) or "all-linear"
    adapter = LoraAdapter.create(model, rank=rank, alpha=alpha, target_modules=targets, seed=seed)
    learner = AdapterAtPeersLearner if is_trained_at_peers else AdapterLearner
    return learner(model, adapter)


def _list_ends(adapter: LoraAdapter) -> list[str]:
    """Return what the linears of an adapter are called, which is the same in each block."""
    modules = (name.rpartition(".lora_")[0] for name in adapter.named_matrices())
    return sorted({module.rpartition(".")[2] for module in modules})


def _compute_loss(model: DistributedCausalLM, batch: Batch) -> Tensor:
    output: Any = model(
        batch.input_ids_BT, attention_mask=batch.attention_mask_BT, labels=batch.labels_BT
    )
    return output.loss
