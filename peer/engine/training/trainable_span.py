"""A span whose weights are trained: passes of parts, exact sums of their gradients, updates.

Tensor suffixes: B rows, T tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ....kernels.exact_sums import FIRST_EXPONENT, ExactSum, choose_exponent
from ....protocol.errors import ErrorCode, RefusedError
from ....protocol.runs.training_run import PartId, TrainingRun
from ....protocol.spans import Span
from .optimizers import SpanOptimizer, compute_clip_factor, compute_squared_norm
from .span_building import build_span


@dataclass(frozen=True)
class LossPass:
    """What the last span computes of a part: the loss, and the gradient of its inputs.

    `loss` is the sum over the tokens of the part, divided by the tokens of the whole update.
    """

    loss: float
    input_grads_BTH: Tensor | None


class TrainableSpan:
    """Weights of a span, their optimizer, and the gradients of the update that is under way.

    A part goes forward once and backward once; only then do its gradients count. All of it follows
    from weights, part and inputs alone, bit for bit, on machines that compute alike: so does the
    sum of an update's parts, whichever replicas computed them.
    """

    def __init__(self, run: TrainingRun, span: Span) -> None:
        self.span = span
        self.update = 0
        self._run = run
        self.modules = build_span(run, span)
        self._weights = self.modules.parameters
        self._optimizer = SpanOptimizer(run.optimizer, self._weights)
        self._exponents = dict.fromkeys(self._weights, FIRST_EXPONENT)
        self._passes = dict[PartId, tuple[Tensor, Tensor]]()
        self.counted = set[PartId]()
        """Parts whose gradients are in the sums."""
        self.sums = self._make_sums()
        """The sums of the counted parts' gradients, by the names of the weights."""

    def run_forward(self, part: PartId, inputs: Tensor) -> Tensor:
        """Return the outputs of a part, [B, T, H]; keeps what its backward pass needs."""
        outputs = self._run_forward(part, inputs)
        return outputs.detach()

    def run_backward(self, part: PartId, output_grads_BTH: Tensor) -> Tensor | None:
        """Count the gradients of a part; return those of its inputs, None for the first span."""
        inputs, outputs = self._passes.pop(part)
        return self._run_backward(part, inputs, outputs, output_grads_BTH)

    def run_loss(self, part: PartId, inputs: Tensor, labels_BT: Tensor) -> LossPass:
        """Run the last span forward and backward, and count the gradients of a part."""
        logits_BTV = self._run_forward(part, inputs)
        loss = functional.cross_entropy(
            logits_BTV.flatten(0, 1), labels_BT.flatten(), reduction="sum"
        )
        loss = loss / self._run.tokens_per_update
        inputs, _ = self._passes.pop(part)
        return LossPass(loss.item(), self._run_backward(part, inputs, loss, None))

    def read_gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the update, summed over all counted parts."""
        return {name: total.read() for name, total in self.sums.items()}

    def measure_norms(self, gradients: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the squared norm of each gradient."""
        return {name: compute_squared_norm(gradient) for name, gradient in gradients.items()}

    def apply_update(self, gradients: Mapping[str, Tensor], squared_norms: Iterable[float]) -> None:
        """Update the weights; `squared_norms` are those of all spans, each tied weight once."""
        run = self._run
        for name, gradient in gradients.items():
            self._exponents[name] = choose_exponent(gradient, self._exponents[name])
        factor = compute_clip_factor(squared_norms, run.optimizer.clip_norm)
        if factor < 1.0:
            gradients = {name: gradient * factor for name, gradient in gradients.items()}
        self._optimizer.step(gradients, run.choose_rate_fraction(self.update))
        self.update += 1
        self.counted.clear()
        self._passes.clear()
        self.sums = self._make_sums()

    def read_weights(self) -> dict[str, Tensor]:
        """Return the weights by their names in a checkpoint; they change with the next update."""
        return {name: weight.detach() for name, weight in self._weights.items()}

    def compute_digest(self) -> str:
        """Return the SHA-256 of all weights, 64 hexadecimal digits."""
        return digest_tensors(self.read_weights())

    def _run_forward(self, part: PartId, inputs: Tensor) -> Tensor:
        if part.update != self.update:
            raise RefusedError(
                ErrorCode.BAD_VALUES, f"{part} comes while update {self.update} is under way"
            )
        torch.manual_seed(self._run.derive_seed("pass", part.update, part.index, self.span.start))
        inputs = inputs.detach()
        if inputs.is_floating_point():
            inputs.requires_grad_()
        with torch.enable_grad():
            outputs = self.modules(inputs)
        self._passes[part] = inputs, outputs
        return outputs

    def _run_backward(
        self, part: PartId, inputs: Tensor, outputs: Tensor, output_grads: Tensor | None
    ) -> Tensor | None:
        wanted: list[Tensor] = list(self._weights.values())
        if inputs.requires_grad:
            wanted.append(inputs)
        grads = list(
            torch.autograd.grad(
                outputs, wanted, output_grads, allow_unused=True, materialize_grads=True
            )
        )
        if not all(bool(grad.isfinite().all()) for grad in grads):
            raise RefusedError(
                ErrorCode.BAD_VALUES, f"the gradients of {part} of span {self.span} are not finite"
            )
        input_grads_BTH = grads.pop() if inputs.requires_grad else None
        for total, grad in zip(self.sums.values(), grads, strict=True):
            total.add(grad)
        self.counted.add(part)
        return input_grads_BTH

    def _make_sums(self) -> dict[str, ExactSum]:
        num_parts = self._run.parts_per_update
        return {
            name: ExactSum(weight.shape, self._exponents[name], num_parts)
            for name, weight in self._weights.items()
        }


def digest_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of named tensors in the order of their names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.numpy().data)
    return digest.hexdigest()
