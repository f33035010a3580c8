"""Adapters of models over a swarm."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

from torch import nn

from ...protocol.errors import UsageError
from ...protocol.ids import ADAPTER_ID_BYTES
from .active_adapters import AdapterChoice, is_digest, read_choice
from .lora import LoraAdapter
from .peer_optimizer import PeerOptimizer

ADAPTER_NAME = "adapter"
"""The part of a model that is its adapter, where one is active from now on."""

UNCHANGED: Any = object()
"""Stands for the adapter that is active anyway."""


class AdaptedModel:
    """Gives a model adapters: active for one call, within a `with` block, or until further notice.

    `config.active_adapter` is the folder or digest of the active adapter, if it has one; assign
    another folder or digest there, and the next call opens it.

    Methods of transformers that would use peft are replaced.
    """

    transformer: Any
    config: Any
    _modules: dict[str, nn.Module | None]
    _adapter_of_config: str | None = None
    """What `config.active_adapter` was when it was looked at last."""

    @property
    def active_adapter(self) -> AdapterChoice:
        """The active LoraAdapter, the digest of a published one, a list with one per row, or None.

        An assigned adapter is active until further notice, outside of `use_adapter()`, and is part
        of the model: an optimizer, accelerate or Trainer with `model.parameters()` trains it. To
        train an adapter that is active for one call or a `with` block, pass `adapter.parameters()`.
        """
        return self.transformer.h.adapters.choice

    @active_adapter.setter
    def active_adapter(self, adapter: AdapterChoice) -> None:
        self.set_adapter(adapter)

    def set_adapter(self, adapter: AdapterChoice) -> None:
        """Make an adapter active until further notice, and its matrices parameters of the model.

        None removes it.
        """
        adapter = read_choice(adapter)
        self.transformer.h.adapters.default = adapter
        self._modules.pop(ADAPTER_NAME, None)
        part = _make_part(adapter)
        if part is not None:
            cast("nn.Module", self).add_module(ADAPTER_NAME, part)
        # What can be written down is; the rest of the configuration can be, too.
        self.config.active_adapter = adapter if isinstance(adapter, str) else None
        self._adapter_of_config = self.config.active_adapter

    def use_adapter(self, adapter: AdapterChoice) -> AbstractContextManager[None]:
        """Make an adapter active within a `with` block, in this thread or task; None: no
        adapter.
        """
        return self.transformer.h.adapters.use(adapter)

    def load_adapter(self, folder: str | Path) -> LoraAdapter:
        """Read an adapter that was saved by shoal or peft, and make it active until further notice.

        Raises UsageError if it does not fit this model.
        """
        adapter = LoraAdapter.load(folder, self)
        self.set_adapter(adapter)
        self.config.active_adapter = self._adapter_of_config = str(folder)
        return adapter

    def _follow_config(self) -> None:
        """Open what somebody has written into `config.active_adapter`, as scripts of PETALS do."""
        wanted: str | Path | None = getattr(self.config, "active_adapter", None)
        if wanted == self._adapter_of_config:
            return
        if wanted is None:
            self.set_adapter(None)
        else:
            self.open_adapter(wanted)

    @property
    def has_adapter_in_training(self) -> bool:
        """Whether the matrices of the active adapter get gradients."""
        choice = self.active_adapter
        listed = choice if isinstance(choice, list | tuple) else [choice]
        return any(
            matrix.requires_grad
            for adapter in listed
            if isinstance(adapter, LoraAdapter)
            for matrix in adapter.parameters()
        )

    def optimizer_at_peers(
        self, adapter: LoraAdapter, kind: str = "adamw", **options: Any
    ) -> PeerOptimizer:
        """See `RemoteSequential.optimizer_at_peers`."""
        return self.transformer.h.optimizer_at_peers(adapter, kind, **options)

    def publish_adapter(self, adapter: LoraAdapter) -> str:
        """See `RemoteSequential.publish_adapter`."""
        return self.transformer.h.publish_adapter(adapter)

    def withdraw_adapter(self, digest: str) -> None:
        """See `RemoteSequential.withdraw_adapter`."""
        self.transformer.h.withdraw_adapter(digest)

    def open_adapter(self, given: AdapterChoice | Path) -> None:
        """Make an adapter active that is given as such, by its folder or by its digest.

        Raises UsageError for anything else.
        """
        if not isinstance(given, str | Path) or (isinstance(given, str) and is_digest(given)):
            self.set_adapter(given)
        elif os.path.exists(given):
            self.load_adapter(given)
        else:
            raise UsageError(
                f"active_adapter {str(given)!r:.80} is neither an existing folder nor the digest "
                f"of a published adapter, which has {2 * ADAPTER_ID_BYTES} hexadecimal digits"
            )

    def __call__(
        self, *inputs: Any, active_adapter: AdapterChoice = UNCHANGED, **options: Any
    ) -> Any:
        """Run the model, with other adapters than those that are active if they are given."""
        keeps = active_adapter is UNCHANGED
        with nullcontext() if keeps else self.use_adapter(active_adapter):
            return super().__call__(*inputs, **options)  # pyright: ignore[reportAttributeAccessIssue]

    def __setattr__(self, name: str, value: Any) -> None:
        """Take an adapter for what it is: torch would make it a part of the model and no more."""
        if name == "active_adapter":
            self.set_adapter(value)
        else:
            super().__setattr__(name, value)


def _make_part(choice: AdapterChoice) -> nn.Module | None:
    """Return a module with the adapters of one's own among those that are active, if any."""
    if isinstance(choice, LoraAdapter):
        return choice
    listed = choice if isinstance(choice, list | tuple) else []
    own = [adapter for adapter in dict.fromkeys(listed) if isinstance(adapter, LoraAdapter)]
    return nn.ModuleList(own) if own else None
