"""Remote blocks as one function that autograd knows how to differentiate.

Tensor suffixes: B rows, T tokens, H hidden, L blocks of a span, P tokens of a deep prompt.
"""

from __future__ import annotations

import sys
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import CheckpointFunction

from ...protocol.errors import UsageError
from ...protocol.ids import AdapterId
from ...protocol.limits import MAX_PASS_TOKENS
from ...protocol.spans import Span
from ..adapters.adapter_versions import AdapterLeaves
from ..concurrency.portal import Portal
from ..passes.microbatches import MicrobatchInputs, TextGradients, Texts
from ..routing.route import Failover, Hop
from .active_adapters import NO_ADAPTERS, ChosenAdapters
from .peer_optimizer import OptimizerShards

Result = TypeVar("Result")

_REENTRANT = (CheckpointFunction.forward.__code__, CheckpointFunction.backward.__code__)
"""The code of checkpoints that torch calls reentrant, which compute a pass again wherever
backward() was called. They do not tell that both are the same pass."""

_LOST_ADAPTERS = (
    "gradient checkpointing repeated a pass with other adapters than the first time: choose the "
    "adapter inside the checkpointed function, or call backward() where it is active, and change "
    "its matrices only afterwards"
)
"""The gradients of such a pass would be those of another function, and none of them for the
adapters."""


class Publications(Protocol):
    """The adapters that a client has published; see `Publisher`."""

    async def publish(self, leaves: AdapterLeaves, span: Span, lineage: str) -> None: ...
    async def withdraw(self, name: AdapterId) -> int: ...


class Passes(Protocol):
    """Stateless passes through remote blocks, on the client's loop; see `RemotePasses`."""

    @property
    def publisher(self) -> Publications: ...
    def can_run(self, span: Span) -> bool: ...
    async def run_forward(
        self, span: Span, texts: Texts
    ) -> tuple[Tensor, list[MicrobatchInputs]]: ...
    async def run_backward(
        self, saved: Sequence[MicrobatchInputs], grads_BTH: Tensor
    ) -> TextGradients: ...
    async def make_sharded_optimizer(self) -> OptimizerShards: ...
    async def take_recent_hops(self) -> list[Hop]: ...
    async def take_failovers(self) -> list[Failover]: ...


class PassRunner:
    """Runs passes for threads that know nothing of event loops."""

    def __init__(self, passes: Passes, portal: Portal) -> None:
        self.remote = passes
        self._portal = portal

    def can_run(self, span: Span, hidden_BTH: Tensor) -> bool:
        """Return whether passes through a span are possible, by the newest announcements."""
        return hidden_BTH.shape[1] <= MAX_PASS_TOKENS and self.remote.can_run(span)

    def run(
        self,
        span: Span,
        hidden_BTH: Tensor,
        prompts_LBPH: Tensor | None = None,
        adapters: ChosenAdapters = NO_ADAPTERS,
    ) -> Tensor:
        """Return hidden states behind the last block of a span, [B, T, H], in the dtype given.

        Differentiable with respect to hidden states, the matrices of adapters, and deep prompts,
        which are [L, B, P, H] or [L, 1, P, H] and added to the first P inputs of each block. Raises
        what `RemotePasses.run_forward` does; so may the backward pass.
        """
        if adapters.rows and _is_in_reentrant_checkpoint():
            raise UsageError(
                "adapters need checkpoint(..., use_reentrant=False): the other kind may repeat a "
                "pass with other adapters"
            )
        matrices = [matrix for _, _, matrix in adapters.list_parameters(span)]
        output: Tensor = _RemoteBlocks.apply(  # pyright: ignore[reportAssignmentType]
            self, span, adapters, hidden_BTH, prompts_LBPH, *matrices
        )
        return output

    def wait_for(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine of `remote` on the client's loop and return its result."""
        return self._portal.run(coroutine)


class _SavedInputs(Tensor):
    """A tensor without numbers, by which autograd keeps the saved inputs of a pass.

    How many tensors these have follows from the route. A checkpoint that computes a pass again
    wants as many as before, and may be given another route: so it sees one, always of the same
    shape. Like any saved tensor it is gone after the way back, unless the graph is retained.
    """

    saved: list[MicrobatchInputs]

    @staticmethod
    def __new__(cls, saved: list[MicrobatchInputs]) -> _SavedInputs:
        inputs = torch.Tensor._make_wrapper_subclass(cls, (0,))  # pyright: ignore
        inputs.saved = saved
        return inputs

    @classmethod
    def __torch_dispatch__(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls, operation: Any, types: Any, arguments: tuple[Any, ...] = (), options: Any = None
    ) -> _SavedInputs:
        """Keep the inputs in whatever torch makes of the tensor, such as a detached one."""
        return cls(arguments[0].saved)


class _RemoteBlocks(torch.autograd.Function):
    """Keeps the inputs of each hop, on the CPU, until autograd frees the graph.

    The backward pass consumes nothing, so it can be repeated (`retain_graph`).
    """

    @staticmethod
    def forward(
        ctx: Any,
        runner: PassRunner,
        span: Span,
        adapters: ChosenAdapters,
        hidden_BTH: Tensor,
        prompts_LBPH: Tensor | None,
        *matrices: Tensor,
    ) -> Tensor:
        # Copies: later changes of the tensors must not change the backward pass.
        prompts = None if prompts_LBPH is None else _copy(prompts_LBPH)
        is_shared = prompts is not None and prompts.shape[1] == 1
        texts = Texts(_copy(hidden_BTH), prompts, is_shared, adapters.rows, adapters.is_trained)
        output_BTH, saved = runner.wait_for(runner.remote.run_forward(span, texts))
        ctx.runner = runner
        ctx.save_for_backward(_SavedInputs(saved))
        inputs = (hidden_BTH, prompts_LBPH, *matrices)
        ctx.places = [(None, None) if x is None else (x.device, x.dtype) for x in inputs]
        # Names only: whose parameters these are would keep them alive, and they this graph.
        ctx.names = [(version, name) for version, name, _ in adapters.list_parameters(span)]
        ctx.adapters = adapters.rows
        return output_BTH.to(hidden_BTH.device, hidden_BTH.dtype)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grads_BTH: Tensor
    ) -> tuple[Tensor | None, ...]:
        (inputs,) = ctx.saved_tensors
        computed = [one for batch in inputs.saved for one in batch.inputs[0].texts.adapters]
        if tuple(computed) != ctx.adapters:  # a checkpoint has computed the pass again
            raise UsageError(_LOST_ADAPTERS)
        runner: PassRunner = ctx.runner
        back = runner.remote.run_backward(inputs.saved, _copy(grads_BTH))
        gradients = runner.wait_for(back)
        matrices = [gradients.adapters.get(version, {}).get(name) for version, name in ctx.names]
        found = (gradients.hidden_BTH, gradients.prompts_LBPH, *matrices)
        wanted = ctx.needs_input_grad[3:]
        return (
            *(None, None, None),
            *(
                grad.to(*place) if is_wanted and grad is not None else None
                for grad, place, is_wanted in zip(found, ctx.places, wanted, strict=True)
            ),
        )


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float32, copy=True)


def _is_in_reentrant_checkpoint() -> bool:
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code in _REENTRANT:
            return True
        frame = frame.f_back
    return False
