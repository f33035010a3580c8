"""A LoRA adapter that a client trains and peers apply.

Tensor suffixes: R rank, I input and O output features of a linear.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ...models.checkpoints.hub import DEFAULT_HUB, Hub
from ...protocol.errors import UsageError
from ...protocol.messages.adapters import DOWN, MAX_RANK, PREFIX, UP, LoraConfig
from ..adapters.adapter_versions import AdapterVersion, ShardedVersion
from ..adapters.peft_files import (
    HEAD,
    LinearShape,
    PeftFiles,
    check_fit,
    check_linear,
    fetch_folder,
    is_adapter_id,
    list_linears,
    make_fields,
    match_targets,
    read_folder,
    write_folder,
)

_ROUTERS = (".gate", ".router")
"""Linears that choose experts: peers have them in another form."""


class RemoteOptimizer(Protocol):
    """An optimizer at peers, as its adapter sees it; see `PeerOptimizer`."""

    def take_version(self) -> ShardedVersion: ...
    def pull(self) -> None: ...
    def restart(self) -> None: ...


class HasConfig(Protocol):
    """A model, here or over a swarm."""

    config: Any


@dataclass(frozen=True)
class HeadPart:
    """The part of an adapter for the head, which adds to logits at the client."""

    down_RI: Tensor
    up_OR: Tensor
    scale: float

    def compute(self, hidden_TI: Tensor) -> Tensor:
        """Return the change in float32, [T, O]."""
        return hidden_TI.float() @ self.down_RI.t() @ self.up_OR.t() * self.scale


class LoraAdapter(nn.Module):
    """The matrices of an adapter in float32, under PEFT's names.

    An optimizer at the client trains its parameters; `state_dict()` is what PEFT stores. While the
    adapter is active, autograd computes their gradients. It cannot be called. With a
    `remote_optimizer`, which runs at peers, the parameters are fetched whenever the adapter is
    saved, copied or used in a session.
    """

    remote_optimizer: RemoteOptimizer | None

    def __init__(self, files: PeftFiles) -> None:
        super().__init__()
        self.lora_config = files.config
        self._fields = files.fields
        self.remote_optimizer = None
        self._newest: AdapterVersion | None = None
        self._lineage = secrets.token_hex(8)
        for name, matrix in files.matrices.items():
            _register(self, name.split("."), nn.Parameter(matrix.detach().clone()))

    @classmethod
    def create(
        cls,
        model: HasConfig,
        *,
        rank: int = 8,
        alpha: float = 16,
        target_modules: str | Sequence[str] = "all-linear",
        seed: int = 0,
    ) -> Self:
        """Return a new adapter for a model; it has no effect until it is trained.

        `target_modules` are as in PEFT: endings of names, a regular expression, or "all-linear" for
        all linears of the blocks. Raises UsageError for modules that the model does not have.
        """
        if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= MAX_RANK:
            raise UsageError(f"rank must be a number from 1 to {MAX_RANK}, not {rank!r}")
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha <= 1e6:
            raise UsageError(f"alpha must be a number above 0, not {alpha!r}")
        model_config: PreTrainedConfig = model.config
        linears = list_linears(model_config)
        if target_modules == "all-linear":
            chosen = [name for name in linears if name != HEAD and not name.endswith(_ROUTERS)]
            written = sorted({name.rpartition(".")[2] for name in chosen})
        else:
            written = target_modules if isinstance(target_modules, str) else list(target_modules)
            chosen = _choose_linears(linears, written)
        generator = torch.Generator().manual_seed(seed)
        matrices: dict[str, Tensor] = {}
        for name in chosen:
            linear = linears[name]
            check_linear(rank, name, linear)
            down_RI = torch.empty(rank, linear.num_inputs)
            nn.init.kaiming_uniform_(down_RI, a=math.sqrt(5), generator=generator)
            matrices[PREFIX + name + DOWN] = down_RI
            matrices[PREFIX + name + UP] = torch.zeros(linear.num_outputs, rank)
        config = LoraConfig(rank, alpha)
        is_transposed = any(linears[name].is_transposed for name in chosen)
        fields = make_fields(config, written, model_config, is_transposed)
        return cls(PeftFiles(config, fields, matrices))

    @classmethod
    def load(
        cls,
        folder: str | Path,
        model: HasConfig,
        hub: Hub | None = None,
    ) -> Self:
        """Read an adapter that was saved by shoal or PEFT, from a folder or the Hub (org/name).

        Raises UsageError that names the first matrix which does not fit the model.
        """
        if not Path(folder).exists() and is_adapter_id(folder):
            folder = fetch_folder(str(folder), hub or DEFAULT_HUB)
        files = read_folder(folder)
        check_fit(files.matrices, files.config.rank, model.config)
        return cls(files)

    @staticmethod
    def can_load(given: str | Path) -> bool:
        """Return whether this names an existing folder, or can be an id on the Hub."""
        return Path(given).exists() or is_adapter_id(given)

    def save(self, folder: str | Path) -> None:
        """Write `adapter_config.json` and `adapter_model.safetensors`, as PEFT reads them."""
        write_folder(folder, PeftFiles(self.lora_config, self._fields, self.copy_matrices()))

    save_pretrained = save

    def pull(self) -> None:
        """Fetch the newest weights if an optimizer at peers trains the adapter."""
        if self.remote_optimizer is not None:
            self.remote_optimizer.pull()

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        """Return the newest matrices under PEFT's names."""
        self.pull()
        return super().state_dict(*arguments, **options)

    def load_state_dict(self, *arguments: Any, **options: Any) -> Any:
        """Replace the matrices; an optimizer at peers continues from them."""
        self.pull()  # what the optimizer remembers stays
        loaded = super().load_state_dict(*arguments, **options)
        if self.remote_optimizer is not None:
            self.remote_optimizer.restart()
        return loaded

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy has, which is trained by nobody."""
        self.pull()
        return {**self.__dict__, "remote_optimizer": None, "_newest": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make a copy an adapter of its own."""
        super().__setstate__(state)
        self._newest, self._lineage = None, secrets.token_hex(8)

    def get_head(self) -> HeadPart | None:
        """Return the part of the adapter that changes the logits, or None."""
        matrices = self.named_matrices()
        if PREFIX + HEAD + DOWN not in matrices:
            return None
        return HeadPart(
            matrices[PREFIX + HEAD + DOWN], matrices[PREFIX + HEAD + UP], self.lora_config.scale
        )

    def __repr__(self) -> str:
        """Leave out the modules that are nothing but names: a large model has thousands."""
        num_linears = len(self.named_matrices()) // 2
        return f"{type(self).__name__}(rank {self.lora_config.rank}, {num_linears} linears)"

    def named_matrices(self) -> Mapping[str, nn.Parameter]:
        """Return all matrices under PEFT's names."""
        return dict(self.named_parameters())

    def copy_matrices(self) -> dict[str, Tensor]:
        """Return the matrices as they are now, on the CPU in float32."""
        self.pull()
        return {
            name: matrix.detach().to("cpu", torch.float32, copy=True)
            for name, matrix in self.named_parameters()
        }

    def take_version(self) -> AdapterVersion:
        """Return the matrices as they are now; the same object while they do not change."""
        self.pull()
        is_trained = any(matrix.requires_grad for matrix in self.parameters())
        known, number = self._newest, 0
        if known is not None:
            number = known.number + 1
            is_same = known.is_trained == is_trained and all(
                torch.equal(matrix.detach().cpu().float(), known.matrices[name])
                for name, matrix in self.named_parameters()
            )
            if is_same:
                return known
        matrices = self.copy_matrices()
        self._newest = AdapterVersion(self.lora_config, matrices, is_trained, self._lineage, number)
        return self._newest

    def forward(self, *inputs: object) -> None:
        """Raise UsageError: peers apply an adapter."""
        raise UsageError("an adapter cannot be called; make it active in a model over a swarm")


def check_is_adapter(given: object, purpose: str) -> LoraAdapter:
    """Return an adapter of one's own; raises UsageError for anything else."""
    if isinstance(given, LoraAdapter):
        return given
    advice = ""
    if isinstance(given, str | PathLike):
        advice = "; load an adapter from a folder with LoraAdapter.load(folder, model)"
    raise UsageError(f"{purpose} takes a LoraAdapter, not {given!r:.80}{advice}")


def _choose_linears(linears: Mapping[str, LinearShape], targets: str | list[str]) -> list[str]:
    """Return the linears that targets mean; UsageError where one of them means none."""
    chosen = match_targets(linears, targets)
    ends = sorted({name.rpartition(".")[2] for name in linears})
    known = ", ".join(ends)
    if isinstance(targets, str):
        if chosen:
            return chosen
        listed = [target.strip() for target in targets.split(",")]
        example = listed if all(match_targets(linears, [one]) for one in listed) else ends[:1]
        raise UsageError(
            f"target_modules {targets!r:.80} is a regular expression for whole names and matches "
            f"no linear of this model; give ends of names as a list, {example}: it has {known}"
        )
    unknown = [target for target in targets if not match_targets(linears, [target])]
    if unknown or not chosen:
        raise UsageError(
            f"this model has no linear that matches target_modules {unknown or targets}; it has "
            + known
        )
    return chosen


def _register(module: nn.Module, path: Sequence[str], matrix: nn.Parameter) -> None:
    """Put a matrix where its name says, below modules that are nothing but names."""
    for name in path[:-1]:
        if name not in module._modules:
            module.add_module(name, nn.Module())
        module = module.get_submodule(name)
    module.register_parameter(path[-1], matrix)
