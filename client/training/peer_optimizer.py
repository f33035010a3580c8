"""A torch optimizer that runs at the peers that hold an adapter's blocks."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from ...protocol.errors import UsageError
from ...protocol.messages.adapters import OptimizerKind, OptimizerSettings
from ...protocol.messages.fields import check_fields
from ..adapters.adapter_versions import ShardedVersion
from ..adapters.learned_states import LearnedState
from .lora import LoraAdapter, check_is_adapter

_DEFAULTS: Mapping[OptimizerKind, Mapping[str, Any]] = {
    OptimizerKind.ADAMW: {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 1e-2,
    },
    OptimizerKind.SGD: {"lr": 1e-3, "momentum": 0.0, "weight_decay": 0.0},
}
"""Those of torch."""

_MOMENTS = {OptimizerKind.ADAMW: ("exp_avg", "exp_avg_sq"), OptimizerKind.SGD: ("momentum_buffer",)}
"""The names that torch's optimizers give to their state of each parameter."""


class OptimizerShards(Protocol):
    """The peers that train one adapter; see `ShardedOptimizer`."""

    @property
    def has_begun(self) -> bool: ...
    def begin(self, state: LearnedState) -> None: ...
    def forget(self) -> None: ...
    def take_version(self, is_trained: bool) -> ShardedVersion: ...
    async def drop_gradients(self) -> None: ...
    async def fetch_norm(self) -> float: ...
    async def update(self, settings: OptimizerSettings, max_norm: float | None) -> None: ...
    async def fetch(self) -> LearnedState | None: ...


class PeerOptimizer(torch.optim.Optimizer):
    """AdamW or SGD of torch, computed where the adapter is applied.

    Neither gradients nor new matrices are transferred: `backward()` accumulates gradients at the
    peers, and `step()` has all peers update, or none. `step()` consumes the gradients, as if
    `zero_grad()` followed. A matrix without a gradient gets one of zero. `param.grad` stays None,
    and parameters are those of the last `pull()`, which saving and generating do automatically.
    Schedulers of torch set the rate as usual; `clip_grad_norm` clips the norm over all peers.

    There is one parameter group. `close()` returns the adapter to the client.
    """

    def __init__(
        self,
        shards: OptimizerShards,
        wait_for: Callable[[Coroutine[Any, Any, Any]], Any],
        adapter: LoraAdapter,
        kind: str = "adamw",
        **options: Any,
    ) -> None:
        """`wait_for` runs a coroutine of `shards` on the client's loop and returns its result.

        Raises UsageError for options that the optimizer does not have.
        """
        self._kind = _read_kind(kind)
        defaults = dict(_DEFAULTS[self._kind])
        unknown = ", ".join(sorted(options.keys() - defaults.keys()))
        if unknown:
            raise UsageError(f"{kind} has no option {unknown}; it has {', '.join(defaults)}")
        adapter = check_is_adapter(adapter, "an optimizer at peers")
        if adapter.get_head() is not None:
            raise UsageError(
                "the adapter of the head stays at the client, where this optimizer cannot update "
                "it: leave lm_head out of target_modules, or use an optimizer of torch"
            )
        if adapter.remote_optimizer is not None:
            raise UsageError("the adapter already has an optimizer at peers; close() that one")
        self.max_grad_norm: float | None = None
        self._shards = shards
        self._wait_for = wait_for
        self._adapter = adapter
        super().__init__(adapter.parameters(), defaults | options)
        self._read_settings()
        adapter.remote_optimizer = self

    def __repr__(self) -> str:
        return f"<PeerOptimizer {self._kind.name.lower()} of {self._adapter!r}>"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Accept the only parameter group; raise UsageError for a second one."""
        if self.param_groups:
            raise UsageError("an optimizer at peers has only one parameter group")
        super().add_param_group(param_group)

    def take_version(self) -> ShardedVersion:
        """Return the adapter as the peers have it; they receive it when the first one is asked."""
        if not self._shards.has_begun:
            self._shards.begin(self._read_state())
        is_trained = any(matrix.requires_grad for matrix in self._adapter.parameters())
        return self._shards.take_version(is_trained)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that were accumulated since the last update.

        Also ends a `step()` that no peer has taken, where one refused. Raises UsageError where some
        have taken it: another `step()` completes it, or `restart()` drops what peers have.
        """
        self._wait_for(self._shards.drop_gradients())

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Clip the global gradient norm at the next `step()`; return the norm before clipping."""
        if not max_norm > 0:
            raise UsageError(f"max_norm must be above 0, not {max_norm!r}")
        norm = torch.tensor(self._wait_for(self._shards.fetch_norm()))
        self.max_grad_norm = float(max_norm)
        return norm

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore
        """Update the adapter at all peers; does nothing if there are no gradients.

        Raises RefusedError if the gradients or the result would not be finite, and the errors of
        passes if a lost peer is not replaced in time. Another call then completes the update.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        settings = self._read_settings()
        self._wait_for(self._shards.update(settings, self.max_grad_norm))
        self.max_grad_norm = None
        return loss

    def pull(self) -> None:
        """Fetch the newest weights and moments into the adapter's parameters and `state`."""
        state = self._wait_for(self._shards.fetch())
        if state is None:
            return
        self.state.clear()
        with torch.no_grad():
            for name, matrix in self._adapter.named_parameters():
                matrix.copy_(state.matrices[name])
                if state.moments:
                    self.state[matrix] = self._name_moments(state, name)

    def restart(self) -> None:
        """Have peers continue from the present parameters and `state`."""
        self._shards.forget()

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of torch's optimizer of the same kind, after a `pull()`."""
        self.pull()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of torch's optimizer of the same kind."""
        self.pull()
        super().load_state_dict(state_dict)
        self.restart()

    def close(self) -> None:
        """Fetch the newest weights and return the adapter to the client."""
        if self._adapter.remote_optimizer is self:
            self.pull()
            self.restart()
            self._adapter.remote_optimizer = None

    def _name_moments(self, state: LearnedState, name: str) -> dict[str, Tensor]:
        moments = zip(_MOMENTS[self._kind], state.moments, strict=True)
        named = {key: file[name].clone() for key, file in moments}
        if self._kind is OptimizerKind.ADAMW:
            named["step"] = torch.tensor(float(state.num_updates))
        return named

    def _read_state(self) -> LearnedState:
        """Return the adapter as it is here, with what `state` says of it."""
        named = dict(self._adapter.named_parameters())
        matrices = {name: _copy(matrix) for name, matrix in named.items()}
        state = LearnedState(self._adapter.lora_config, self._kind, matrices)
        known = {name: self.state[matrix] for name, matrix in named.items() if self.state[matrix]}
        if not known:
            return state
        numbers = {int(one.get("step", 1)) for one in known.values()}
        keys = _MOMENTS[self._kind]
        if len(numbers) != 1 or any(one.get(key) is None for one in known.values() for key in keys):
            raise UsageError("peers cannot go on from this state: it differs between matrices")
        moments = tuple(
            {
                name: _copy(known[name][key]) if name in known else torch.zeros_like(matrix)
                for name, matrix in matrices.items()
            }
            for key in keys
        )
        return LearnedState(
            self._adapter.lora_config, self._kind, matrices, moments, max(1, *numbers)
        )

    def _read_settings(self) -> OptimizerSettings:
        """Return the options as they are now; raises UsageError for what peers would refuse."""
        group = self.param_groups[0]
        beta1, beta2 = group.get("betas", (0.0, 0.0))
        settings = OptimizerSettings(
            self._kind,
            float(group["lr"]),
            float(group["weight_decay"]),
            float(group.get("momentum", 0.0)),
            float(beta1),
            float(beta2),
            float(group.get("eps", 0.0)),
        )
        try:
            check_fields(settings)
        except ValueError as error:
            raise UsageError(str(error)) from None
        return settings


def _read_kind(name: str) -> OptimizerKind:
    known = {kind.name.lower(): kind for kind in _DEFAULTS}
    if name not in known:
        raise UsageError(f"peers run {' or '.join(known)}, not {name!r:.60}")
    return known[name]


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float32, copy=True)
