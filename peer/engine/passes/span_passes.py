"""Forward and backward passes of batches through the blocks of an engine, without a KV cache.

Weights are frozen: there are gradients of the hidden states that go in, of the deep prompts that
are added to them, and of adapters. A backward pass relies on nothing that a forward pass left, so
any peer can run either.

Tensor suffixes: B rows and T tokens of a pass, N rows times tokens, L blocks of a span, P tokens
of a deep prompt, H hidden.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeVar

import torch
from torch import Tensor

from ....kernels.attention.rotary import RotaryTable
from ....kernels.linear.quantize import WeightFormat
from ....kernels.pauses import COST_BETWEEN_PAUSES, NO_PAUSES, GiveWay, Pauses
from ....kernels.wire_tensors import has_only_finite
from ....models.specs.model_spec import ModelShape
from ....protocol.errors import ErrorCode, RefusedError
from ....protocol.spans import Span
from ..adapters.adapter import Adapter
from ..adapters.adapter_file import name_matrices
from ..blocks.batch import AdaptedTokens, HostedBlock, PassBatch
from ..devices.device import Numerics
from .pass_memory import estimate_pass_bytes

Result = TypeVar("Result")

TOKENS_AT_ONCE = dict.fromkeys(WeightFormat, 256) | {WeightFormat.INT8: 64}
"""As few as make products no slower, on the CPU: what they become stays in its caches."""

_TOKENS_AT_ONCE_ON_DEVICES = 4096

NUMBERS_AT_ONCE = 2**20
"""Of tensors that are looked at or copied as a whole: that takes about a millisecond."""


@dataclass(frozen=True)
class PassWork:
    """Rows of equal length on their way through some hosted blocks.

    `prompts_LBPH[l]` is added to the first P tokens of the input of block `l` of the span; a B of
    one stands for all rows. Tensors may be of any float dtype. `adapters` has one or None for each
    row, or is empty; a backward pass computes their gradients if `wants_adapters`.
    """

    span: Span
    hidden_BTH: Tensor
    prompts_LBPH: Tensor | None = None
    adapters: tuple[Adapter | None, ...] = ()
    wants_adapters: bool = True


@dataclass(frozen=True)
class Gradients:
    """The gradients of the hidden states and the prompts of a pass, in their shapes.

    Those of each adapter's matrices are in float32, by their names in PEFT.
    """

    hidden_BTH: Tensor
    prompts_LBPH: Tensor | None
    adapters: Mapping[Adapter, Mapping[str, Tensor]]


class ActivationCache:
    """Keeps the newest inputs that fit, until they are taken. Nothing may rely on them.

    A pass is found by its contents, so its inputs are those that computing would give again.
    """

    def __init__(self) -> None:
        self._kept: dict[Hashable, list[Tensor]] = {}
        self._budget_bytes = 0
        self.num_bytes = 0

    def limit(self, budget_bytes: int) -> None:
        """Keep at most so many bytes from now on."""
        self._budget_bytes = budget_bytes
        self.make_room(0)

    def make_room(self, num_bytes: int) -> bool:
        """Forget the oldest until there is room for so much; False where there never is."""
        if num_bytes > self._budget_bytes:
            return False
        while self.num_bytes + num_bytes > self._budget_bytes:
            self.take(next(iter(self._kept)))
        return True

    def keep(self, key: Hashable, inputs: list[Tensor]) -> None:
        """Keep the inputs of all blocks of a pass, if there is room."""
        self.take(key)
        num_bytes = _count_bytes(inputs)
        if self.make_room(num_bytes):
            self._kept[key] = inputs
            self.num_bytes += num_bytes

    def take(self, key: Hashable) -> list[Tensor] | None:
        """Return the inputs of a pass and forget them; None where they are not kept."""
        inputs = self._kept.pop(key, None)
        if inputs is not None:
            self.num_bytes -= _count_bytes(inputs)
        return inputs


class SpanPasses:
    """Runs passes through the blocks of a span.

    A forward pass needs one tensor of the size of its hidden states, a backward pass one for each
    block. To that comes what a single block needs at once: queries, keys and values of all tokens,
    and the rest for some hundred tokens. A forward pass computes a block once; a backward pass
    twice, and then the gradient, which is as much again.

    `give_way` may execute steps of sessions. It is called between blocks, and on the CPU after
    every few milliseconds; never with a tensor of the pass half written. `activations` keep the
    inputs of blocks for backward passes, in as much memory as they are given.
    """

    def __init__(
        self,
        spec: ModelShape,
        span: Span,
        blocks: Sequence[HostedBlock],
        rotary: Sequence[RotaryTable],
        numerics: Numerics,
    ) -> None:
        self._spec = spec
        self._span = span
        self._blocks = blocks
        self._rotary = rotary
        self._device = numerics.device
        self._dtype = numerics.dtype
        self._weights = numerics.weights
        self.activations = ActivationCache()

    def run_forward(self, work: PassWork, give_way: GiveWay) -> Tensor:
        """Return the hidden states behind the last block of the work's span, [B, T, H]."""
        _check_work(work, give_way)
        return self._guard(work, lambda: self._run_forward(work, give_way))

    def run_backward(self, work: PassWork, grads_BTH: Tensor, give_way: GiveWay) -> Gradients:
        """Return the gradients of the inputs, given those of the output of `run_forward`."""
        _check_work(work, give_way)
        _check_finite(grads_BTH, "the gradients", give_way)
        return self._guard(work, lambda: self._run_backward(work, grads_BTH, give_way))

    def estimate_bytes(
        self, num_blocks: int, num_rows: int, num_tokens: int, *, is_backward: bool
    ) -> int:
        """Return about the most memory that a pass of this size takes."""
        return estimate_pass_bytes(
            self._spec, self._weights, self._dtype, num_blocks, num_rows, num_tokens,
            tokens_at_once=self._tokens_at_once, is_backward=is_backward,
        )  # fmt: skip

    def _guard(self, work: PassWork, run: Callable[[], Result]) -> Result:
        """Run in the modes that a pass needs; refuse if memory runs out."""
        try:
            # The caller may be in inference mode, whose tensors have no gradients.
            with torch.inference_mode(False), torch.no_grad(), self._device.running():
                return run()
        except (RuntimeError, MemoryError) as error:
            if not _is_out_of_memory(error):
                raise
        # Only here: the error holds the frames that it went through, with all their tensors.
        num_rows, num_tokens, _ = work.hidden_BTH.shape
        raise RefusedError(
            ErrorCode.OUT_OF_MEMORY,
            f"this peer has no memory for {num_rows} x {num_tokens} tokens at once; send smaller "
            "microbatches",
        )

    def _run_forward(self, work: PassWork, give_way: GiveWay) -> Tensor:
        batches = self._bind(work, self._open_adapters(work, has_gradients=False), give_way)
        blocks = self._find_blocks(work)
        # A backward pass that follows needs the inputs again.
        num_bytes = work.hidden_BTH.numel() * self._dtype.itemsize * len(blocks)
        inputs: list[Tensor] | None = [] if self.activations.make_room(num_bytes) else None
        hidden_NH = self._run_blocks(work, batches, len(blocks), inputs, give_way)
        output_BTH = self._fetch(hidden_NH, work.hidden_BTH.shape, give_way)
        if inputs is not None:
            self.activations.keep(_make_key(work, give_way), inputs)
        return output_BTH

    def _run_blocks(
        self,
        work: PassWork,
        batches: Sequence[PassBatch],
        num_outputs: int,
        inputs: list[Tensor] | None,
        give_way: GiveWay,
    ) -> Tensor:
        """Return the output of the first `num_outputs` blocks; note the input of every one."""
        hidden_NH, prompts_LBPH = self._bring(work.hidden_BTH, give_way), self._bring_prompts(work)
        for index, (block, batch) in enumerate(zip(self._find_blocks(work), batches, strict=True)):
            give_way()
            hidden_NH = _add_prompt(hidden_NH, prompts_LBPH, index, batch)
            if inputs is not None:
                inputs.append(hidden_NH)
            if index < num_outputs:
                hidden_NH = block.run_pass(hidden_NH, batch)
        return hidden_NH

    def _run_backward(self, work: PassWork, grads_BTH: Tensor, give_way: GiveWay) -> Gradients:
        adapters = self._open_adapters(work, has_gradients=work.wants_adapters)
        batches = self._bind(work, adapters, give_way)
        blocks = self._find_blocks(work)
        inputs = self.activations.take(_make_key(work, give_way))
        if inputs is None:
            inputs = []
            self._run_blocks(work, batches, len(blocks) - 1, inputs, give_way)
        grads_NH, prompts_LBPH = self._bring(grads_BTH, give_way), self._bring_prompts(work)
        prompt_grads_LBPH = None if prompts_LBPH is None else torch.empty_like(prompts_LBPH)
        for index, block in reversed(list(enumerate(blocks))):
            give_way()
            grads_NH = block.run_pass_back(inputs.pop(), grads_NH, batches[index])
            if prompt_grads_LBPH is not None:
                _take_prompt(grads_NH, prompt_grads_LBPH[index], batches[index])
        hidden_grads_BTH = self._fetch(grads_NH, grads_BTH.shape, give_way)
        if prompt_grads_LBPH is not None:
            shape = prompt_grads_LBPH.shape
            prompt_grads_LBPH = self._fetch(prompt_grads_LBPH, shape, give_way)
        adapter_grads = {
            adapter: {name: _fetch_matrix(name, grad) for name, grad in grads.items()}
            for adapter, grads in (_collect(adapters) if work.wants_adapters else {}).items()
        }
        return Gradients(hidden_grads_BTH, prompt_grads_LBPH, adapter_grads)

    def _bind(
        self, work: PassWork, adapters: Mapping[Adapter, Adapter], give_way: GiveWay
    ) -> list[PassBatch]:
        """Return the batch as each block computes it, with the adapters for its linears."""
        num_rows, num_tokens, _ = work.hidden_BTH.shape
        rotations = tuple(table.rows(0, num_tokens) for table in self._rotary)
        # On other devices the pieces of a block are queued at once, so pauses bring nothing.
        pauses = Pauses(give_way, COST_BETWEEN_PAUSES) if self._is_on_cpu else NO_PAUSES
        batch = PassBatch(num_rows, num_tokens, rotations, pauses, self._tokens_at_once)
        ranges = _find_adapted(work)
        return [
            replace(
                batch,
                adapters=tuple(
                    AdaptedTokens(tokens, adapters[adapter].bind(index, block.linears))
                    for tokens, adapter in ranges
                ),
            )
            for index, block in enumerate(self._find_blocks(work), work.span.start)
        ]

    def _open_adapters(self, work: PassWork, *, has_gradients: bool) -> dict[Adapter, Adapter]:
        """Return a pass's adapters on the device; for gradients, copies that accumulate them."""
        return {
            adapter: adapter.open(self._device.torch_device, has_gradients)
            for adapter in dict.fromkeys(work.adapters)
            if adapter is not None
        }

    def _find_blocks(self, work: PassWork) -> Sequence[HostedBlock]:
        return self._blocks[work.span.start - self._span.start :][: len(work.span)]

    @property
    def _is_on_cpu(self) -> bool:
        return self._device.torch_device.type == "cpu"

    @property
    def _tokens_at_once(self) -> int:
        return TOKENS_AT_ONCE[self._weights] if self._is_on_cpu else _TOKENS_AT_ONCE_ON_DEVICES

    def _bring(self, hidden_BTH: Tensor, give_way: GiveWay) -> Tensor:
        """Return a copy on the device, [N, H], which autograd may use."""
        hidden_NH = hidden_BTH.reshape(-1, self._spec.hidden_size)
        brought_NH = torch.empty(
            hidden_NH.shape, dtype=self._dtype, device=self._device.torch_device
        )
        num_vectors = max(1, NUMBERS_AT_ONCE // self._spec.hidden_size)
        for target, source in zip(
            brought_NH.split(num_vectors), hidden_NH.split(num_vectors), strict=True
        ):
            give_way()
            target.copy_(source)
        return brought_NH

    def _bring_prompts(self, work: PassWork) -> Tensor | None:
        prompts_LBPH = work.prompts_LBPH
        return (
            None
            if prompts_LBPH is None
            else prompts_LBPH.to(self._device.torch_device, self._dtype)
        )

    def _fetch(self, result: Tensor, shape: torch.Size, give_way: GiveWay) -> Tensor:
        if not _has_only_finite(result, give_way):
            raise _make_refusal("these hidden states or gradients make the blocks overflow")
        return result.view(shape).cpu()


def _find_adapted(work: PassWork) -> list[tuple[slice, Adapter]]:
    """Return the tokens of neighbouring rows with the same adapter, and the adapter."""
    num_tokens = work.hidden_BTH.shape[1]
    found: list[tuple[slice, Adapter]] = []
    for adapter, group in groupby(enumerate(work.adapters), key=lambda item: item[1]):
        rows = [row for row, _ in group]
        if adapter is not None:
            found.append((slice(rows[0] * num_tokens, (rows[-1] + 1) * num_tokens), adapter))
    return found


def _collect(adapters: Mapping[Adapter, Adapter]) -> dict[Adapter, dict[str, Tensor]]:
    """Return the gradients of each adapter's matrices, in float32, by their names in PEFT."""
    return {
        adapter: {
            name: torch.zeros_like(matrix) if matrix.grad is None else matrix.grad
            for parts in copy.parts.values()
            for part in parts
            for name, matrix in name_matrices(part)
        }
        for adapter, copy in adapters.items()
    }


def _fetch_matrix(name: str, grads: Tensor) -> Tensor:
    if not has_only_finite(grads):
        raise _make_refusal(f"the gradients of {name} are not finite")
    return grads.cpu()


def _make_key(work: PassWork, give_way: GiveWay) -> Hashable:
    """Return a key of a pass: its blocks, a digest of its tensors on the CPU, and its adapters."""
    digest = hashlib.blake2b(digest_size=32)
    shapes: list[Hashable] = []
    for tensor in (work.hidden_BTH, work.prompts_LBPH):
        if tensor is not None:
            for part in tensor.reshape(-1).split(NUMBERS_AT_ONCE):
                give_way()
                digest.update(part.view(torch.uint8).numpy().data)
        shapes.append(None if tensor is None else (tensor.dtype, tensor.shape))
    return work.span, tuple(shapes), work.adapters, digest.digest()


def _count_bytes(inputs: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in inputs)


def _make_refusal(detail: str) -> RefusedError:
    return RefusedError(ErrorCode.BAD_VALUES, detail)


def _check_work(work: PassWork, give_way: GiveWay) -> None:
    """Raise RefusedError unless all numbers are finite; the message was checked for the rest."""
    _check_finite(work.hidden_BTH, "the hidden states", give_way)
    if work.prompts_LBPH is not None:
        _check_finite(work.prompts_LBPH, "the prompts", give_way)


def _check_finite(tensor: Tensor, name: str, give_way: GiveWay) -> None:
    if not _has_only_finite(tensor, give_way):
        raise _make_refusal(f"{name} are not finite")


def _has_only_finite(tensor: Tensor, give_way: GiveWay) -> bool:
    for part in tensor.reshape(-1).split(NUMBERS_AT_ONCE):
        give_way()
        if not has_only_finite(part):
            return False
    return True


def _add_prompt(
    hidden_NH: Tensor, prompts_LBPH: Tensor | None, index: int, batch: PassBatch
) -> Tensor:
    """Add a block's prompt to its input, in place."""
    if prompts_LBPH is not None:
        hidden_BTH = hidden_NH.unflatten(0, (batch.num_rows, batch.num_tokens))
        hidden_BTH[:, : prompts_LBPH.shape[2]] += prompts_LBPH[index]
    return hidden_NH


def _take_prompt(grads_NH: Tensor, prompt_grads_BPH: Tensor, batch: PassBatch) -> None:
    """Write the gradients of a prompt: those of the hidden states that it was added to."""
    num_prompt_rows, num_prompt_tokens, _ = prompt_grads_BPH.shape
    grads_BPH = grads_NH.unflatten(0, (batch.num_rows, batch.num_tokens))[:, :num_prompt_tokens]
    if num_prompt_rows < batch.num_rows:
        grads_BPH = grads_BPH.sum(dim=0, keepdim=True, dtype=torch.float32)
    prompt_grads_BPH.copy_(grads_BPH)


def _is_out_of_memory(error: Exception) -> bool:
    """Return whether memory ran out: torch has a type of error for devices only."""
    is_allocator = "DefaultCPUAllocator" in str(error)
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or is_allocator
