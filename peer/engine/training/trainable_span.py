"""A span whose weights are trained: passes of parts, exact sums of their gradients, updates.

Tensor suffixes: B rows, T tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from ....kernels.exact_sums import (
    FIRST_EXPONENT,
    LEAST_EXPONENT,
    MOST_EXPONENT,
    ExactSum,
    choose_exponent,
)
from ....protocol.errors import ErrorCode, RefusedError, UsageError
from ....protocol.limits import MAX_HELD_OUT_LOSS
from ....protocol.runs.training_run import PartId, TrainingRun
from ....protocol.spans import Span
from .numerics import computing_alike, digest_bits, has_bf16_products, sum_squares
from .optimizers import SpanOptimizer, compute_clip_factor
from .span_building import build_span
from .span_state import WEIGHTS_PREFIX, StateDigest, digest_tensors

DEFAULT_GRAPH_BYTES = 2**30

_MOST_USUAL_NORMS = 10
"""The largest norm of a part's gradient, in those that parts have usually."""

_ROUNDED_UP = 1.1
"""What 8-bit integers may add to a norm."""


class NotFiniteError(RefusedError):
    """A part of which this machine computes numbers that are not finite, as its replicas will."""

    def __init__(self, what: str, part: PartId, span: Span) -> None:
        detail = f"the {what} of {part} of span {span} are not finite"
        super().__init__(ErrorCode.BAD_VALUES, detail)


@dataclass(frozen=True)
class PartResult:
    """What a span computes of a part."""

    gradients_digest: bytes
    """Of the gradients of the weights."""
    input_grads_BTH: Tensor | None
    """None for the first span."""
    loss: float | None
    """Of the last span: the sum over the tokens of the part, divided by the tokens of the whole
    update."""


@dataclass
class _Pass:
    """A part between its passes; without outputs, its backward pass begins with its forward one."""

    inputs: Tensor
    outputs: Tensor | None


class TrainableSpan:
    """Weights of a span, their optimizer, and the gradients of the update that is under way.

    A part goes forward once and backward once; then its gradients are in the sums, which is called
    counted. `discount` takes them out again, with nothing left of them. All of it follows from
    weights, part, inputs and number of threads alone, bit for bit, on machines of one class
    (`numerics_class.py`): so does the sum of an update's parts, whichever replicas computed them.

    Callers give tensors of the right shapes and dtypes, and token ids of the model: bytes of other
    members and shards of the corpus are read as nothing else. Their numbers are checked before
    anything changes. Raises RefusedError for a part that is not one of the update under way, that
    is counted already, or whose inputs or gradients are not finite; it may then be tried again.

    Graphs of passes under way take at most `graph_bytes`, and no more than `read_free_bytes` says
    that this machine still has; the backward passes of the other parts compute their forward passes
    again.

    Raises UsageError where this machine lacks what the run is computed with.
    """

    def __init__(
        self,
        run: TrainingRun,
        span: Span,
        *,
        num_threads: int = 1,
        graph_bytes: int = DEFAULT_GRAPH_BYTES,
        read_free_bytes: Callable[[], int] | None = None,
    ) -> None:
        self.span = span
        self._num_threads = num_threads
        self.update = 0
        self.squared_norm = 0.0
        """Of the gradient of all spans in the last update; 0: there was none."""
        self._run = run
        check_machine(run)
        self.modules = build_span(run, span)
        self._weights = self.modules.parameters
        self._optimizer = SpanOptimizer(run.optimizer, self._weights)
        self._passes = dict[PartId, _Pass]()
        self._max_graph_bytes = graph_bytes
        self._read_free_bytes = read_free_bytes
        self._bytes_per_graph: int | None = None
        self._boundaries = dict[PartId, str]()
        """Of each counted part, the digest of what its passes began with."""
        # Of a weight that two spans hold, each part has two addends.
        self.sums = {
            name: ExactSum(weight.shape, FIRST_EXPONENT, 2 * run.parts_per_update)
            for name, weight in self._weights.items()
        }
        """The sums of the counted parts' gradients, by the names of the weights."""

    @property
    def tied_names(self) -> list[str]:
        """The weights that another span of the run holds, too, where the model has several."""
        return self.modules.tied_names

    @property
    def counted(self) -> Set[PartId]:
        """The parts whose gradients are in the sums."""
        return self._boundaries.keys()

    @property
    def graph_bytes(self) -> int:
        """Memory of the graphs of passes under way."""
        num_graphs = sum(one.outputs is not None for one in self._passes.values())
        return num_graphs * (self._bytes_per_graph or 0)

    def run_forward(self, part: PartId, inputs: Tensor) -> Tensor:
        """Return the outputs of a part, [B, T, H]; keeps what its backward pass needs.

        The inputs are token ids [B, T] for the first span, and hidden states [B, T, H] for the
        others; the caller leaves them as they are. The forward pass of a part may be repeated until
        its backward pass has run.
        """
        assert not self.modules.is_last
        self._check_part(part)
        _check_finite(inputs, "inputs")
        inputs = _prepare(inputs)
        if self._bytes_per_graph is None:
            outputs, self._bytes_per_graph = self._measure_graph(part, inputs)
        else:
            outputs = self._compute(part, inputs)
        if not _is_finite(outputs.detach()):
            raise NotFiniteError("outputs", part, self.span)
        self._passes.pop(part, None)
        is_kept = self._has_room_for(self.graph_bytes + self._bytes_per_graph)
        self._passes[part] = _Pass(inputs, outputs if is_kept else None)
        return outputs.detach()

    def _has_room_for(self, graph_bytes: int) -> bool:
        """Return whether our graphs may take so much, with the one that was just computed."""
        if graph_bytes > self._max_graph_bytes:
            return False
        return self._read_free_bytes is None or graph_bytes <= self._read_free_bytes()

    def run_backward(self, part: PartId, output_grads_BTH: Tensor) -> PartResult:
        """Count the gradients of a part, by those of its outputs."""
        self._check_part(part)
        if part not in self._passes:
            raise _refuse(f"{part} has had no forward pass here")
        _check_finite(output_grads_BTH, "output gradients")
        kept = self._passes[part]
        outputs, kept.outputs = kept.outputs, None  # a graph is used up, whatever comes of it
        grads, result = self._differentiate(part, kept.inputs, output_grads_BTH, outputs)
        self._count(part, grads, kept.inputs, output_grads_BTH)
        del self._passes[part]
        return result

    def run_loss(self, part: PartId, inputs: Tensor, labels_BT: Tensor) -> PartResult:
        """Run the last span forward and backward, and count the gradients of a part."""
        assert self.modules.is_last
        self._check_part(part)
        _check_finite(inputs, "inputs")
        inputs = _prepare(inputs)
        grads, result = self._differentiate(part, inputs, labels_BT)
        self._count(part, grads, inputs, labels_BT)
        return result

    def evaluate(self, update: int, inputs: Tensor) -> Tensor:
        """Return the outputs of inputs by the weights before an update; keeps nothing of them.

        They are the logits behind the last span. Raises RefusedError unless the update is under
        way. Numbers that are not finite come to the loss.
        """
        if update != self.update:
            raise _refuse(f"update {self.update} is under way, not {update}")
        with computing_alike(self._num_threads):
            return self.modules.evaluate(inputs)

    def evaluate_loss(self, update: int, inputs: Tensor, labels_BT: Tensor) -> float:
        """Return the mean loss of the last span in nats per token: MAX_HELD_OUT_LOSS where it is
        more, or not finite.
        """
        assert self.modules.is_last
        logits_BTV = self.evaluate(update, inputs)
        with computing_alike(self._num_threads):
            summed = functional.cross_entropy(
                logits_BTV.flatten(0, 1), labels_BT.flatten(), reduction="sum"
            )
        loss, most = summed.item() / labels_BT.numel(), MAX_HELD_OUT_LOSS
        return loss if loss < most else most  # NaN is not less

    def discount(self, part: PartId, inputs: Tensor, target: Tensor) -> None:
        """Take the gradients of a counted part out of the sums; they are computed again.

        `inputs` and `target` (the output gradients; for the last span, the labels) must be those
        with which the part was counted, else RefusedError. The part can be counted again then.
        """
        if part not in self._boundaries:
            raise _refuse(f"{part} is not counted here")
        if self._boundaries[part] != _digest_boundary(inputs, target):
            raise _refuse(f"{part} was counted with other inputs")
        grads, _ = self._differentiate(part, _prepare(inputs), target)
        for total, grad in zip(self.sums.values(), grads, strict=True):
            total.subtract(grad)
        del self._boundaries[part]

    def audit(self, part: PartId, inputs: Tensor, target: Tensor) -> tuple[Tensor, PartResult]:
        """Compute a part, counted or not, and count nothing; see `discount` for the arguments.

        Returns the outputs as well: the logits, for the last span.
        """
        self._check_under_way(part)
        _check_finite(inputs, "inputs")
        _check_finite(target, "output gradients")
        inputs = _prepare(inputs)
        outputs = self._compute(part, inputs)
        _, result = self._differentiate(part, inputs, target, outputs)
        return outputs.detach(), result

    def read_gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the update, summed over all counted parts."""
        return {name: total.read() for name, total in self.sums.items()}

    def measure_squared_norm(self, gradients: Mapping[str, Tensor]) -> float:
        """Return the squared norm of the gradients, however they are ordered, and whatever number
        of threads computes it. Only the first span of a run counts tied weights.
        """
        left_out = () if self.modules.is_first else self.tied_names
        return math.fsum(
            sum_squares(one) for name, one in gradients.items() if name not in left_out
        )

    def apply_update(self, gradients: Mapping[str, Tensor], squared_norm: float) -> None:
        """Update the weights; `squared_norm` is the sum of those of all spans.

        The gradients are clipped in place. All passes under way end.
        """
        run = self._run
        for name, gradient in gradients.items():
            total = self.sums[name]
            total.reset(choose_exponent(gradient, total.exponent))
        factor = compute_clip_factor(squared_norm, run.optimizer.clip_norm)
        if factor < 1.0:
            for gradient in gradients.values():
                gradient.mul_(factor)
        with computing_alike(self._num_threads):
            self._optimizer.step(gradients, run.compute_learning_rate_factor(self.update))
        self.squared_norm = squared_norm
        self._begin(self.update + 1)

    @property
    def most_sum_norm(self) -> float:
        """The largest norm of any parts' gradients together."""
        return _ROUNDED_UP * self._run.parts_per_update * self._most_part_norm

    @property
    def _most_part_norm(self) -> float:
        """The norm to which the gradient of a part is shortened; infinite in the first update.

        Were the last update's parts independent, they would have had the norm of the update over
        the root of their number; those that point into one direction have less. The limit follows
        from the state, so replicas have the same one, and parts are not shortened in any other way
        by who computes them.
        """
        if not self.squared_norm:
            return math.inf
        usual_norm = math.sqrt(self.squared_norm / self._run.parts_per_update)
        return _MOST_USUAL_NORMS * usual_norm

    def forget_parts(self) -> None:
        """Begin the update under way again, with no part counted."""
        for total in self.sums.values():
            total.reset(total.exponent)
        self._begin(self.update)

    def read_weights(self) -> dict[str, Tensor]:
        """Return the weights by their names in a checkpoint; they change with the next update."""
        trained = {name: weight.detach() for name, weight in self._weights.items()}
        return trained | self.modules.constants

    def read_state(self) -> dict[str, Tensor]:
        """Return all that the next updates follow from; it changes with the next update.

        That is the weights, the state of the optimizer, the exponents of the sums in the order of
        their names, the squared norm of the last gradient, and the number of the update under way.
        """
        exponents = [self.sums[name].exponent for name in sorted(self.sums)]
        return {
            "update": torch.tensor(self.update),
            "exponents": torch.tensor(exponents),
            "squared_norm": torch.tensor(self.squared_norm, dtype=torch.float64),
            **{f"{WEIGHTS_PREFIX}{name}": weight for name, weight in self.read_weights().items()},
            **{f"optimizer/{name}": one for name, one in self._optimizer.read_state().items()},
        }

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from the state of another replica, of which nothing is kept.

        It has the tensors of `read_state`. Raises RefusedError, before anything changes, for
        numbers that no state has.
        """
        for name, tensor in state.items():
            _check_finite(tensor, name)
        update, exponents = int(state["update"]), state["exponents"].tolist()
        if not 0 <= update <= self._run.num_updates:
            raise _refuse(f"the run has {self._run.num_updates} updates, no number {update}")
        if not all(LEAST_EXPONENT <= exponent <= MOST_EXPONENT for exponent in exponents):
            raise _refuse("the state has exponents that no sum has")
        if float(state["squared_norm"]) < 0:
            raise _refuse("the state has a squared norm below zero")
        for name, tensor in self.read_state().items():
            tensor.copy_(state[name])
        for name, exponent in zip(sorted(self.sums), exponents, strict=True):
            self.sums[name].reset(exponent)
        self.squared_norm = float(state["squared_norm"])
        self._begin(update)

    def compute_digest(self) -> str:
        """Return the SHA-256 of the state, 64 hexadecimal digits; equal replicas have the same."""
        return StateDigest.of(self.read_state()).whole.hex()

    def _begin(self, update: int) -> None:
        """Forget what belonged to another update; the sums have been reset."""
        self.update = update
        self._boundaries.clear()
        self._passes.clear()

    def _compute(self, part: PartId, inputs: Tensor) -> Tensor:
        """Return the outputs of a part with their graph; torch's own generator stays as it was.

        In bf16, torch decides which functions compute in that; their results that leave the span
        are float32.
        """
        seed = self._run.derive_seed("pass", part.update, part.index, self.span.start)
        alike = computing_alike(self._num_threads)
        cast = torch.autocast("cpu", torch.bfloat16, enabled=self._run.precision == "bf16")
        with alike, cast, torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.default_generator.manual_seed(seed)
            return self.modules(inputs).float()

    def _measure_graph(self, part: PartId, inputs: Tensor) -> tuple[Tensor, int]:
        """Return the outputs of a part, and the bytes that their graph keeps: those of any part."""
        kept = dict[int, int]()

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return tensor.detach()  # an output that is kept for its own backward pass is a circle

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = self._compute(part, inputs)
        for weight in self._weights.values():
            kept.pop(weight.untyped_storage().data_ptr(), None)
        return outputs, sum(kept.values())

    def _differentiate(
        self, part: PartId, inputs: Tensor, target: Tensor, outputs: Tensor | None = None
    ) -> tuple[list[Tensor], PartResult]:
        """Run the backward pass of a part, and its forward pass where there are no outputs.

        Returns the gradients of the weights as well.
        """
        if outputs is None:
            outputs = self._compute(part, inputs)
        wanted = [*self._weights.values(), *([inputs] if inputs.requires_grad else [])]
        loss, output_grads = None, target
        with computing_alike(self._num_threads):
            if self.modules.is_last:
                summed = functional.cross_entropy(
                    outputs.flatten(0, 1), target.flatten(), reduction="sum"
                )
                outputs, output_grads = summed / self._run.tokens_per_update, None
                loss = outputs.item()
            grads = list(
                torch.autograd.grad(
                    outputs, wanted, output_grads, allow_unused=True, materialize_grads=True
                )
            )
        if not all(map(_is_finite, grads)) or (loss is not None and not math.isfinite(loss)):
            raise NotFiniteError("gradients", part, self.span)
        input_grads_BTH = grads.pop() if inputs.requires_grad else None
        grads = self._shorten(grads)
        return grads, PartResult(digest_bits(grads), input_grads_BTH, loss)

    def _shorten(self, grads: list[Tensor]) -> list[Tensor]:
        """Return the gradients of a part, with the largest norm that they may have."""
        norm = math.sqrt(math.fsum(map(sum_squares, grads)))
        most = self._most_part_norm
        return grads if norm <= most else [grad * (most / norm) for grad in grads]

    def _count(self, part: PartId, grads: list[Tensor], inputs: Tensor, target: Tensor) -> None:
        for total, grad in zip(self.sums.values(), grads, strict=True):
            total.add(grad)
        self._boundaries[part] = _digest_boundary(inputs, target)

    def _check_part(self, part: PartId) -> None:
        self._check_under_way(part)
        if part in self._boundaries:
            raise _refuse(f"{part} is counted already")

    def _check_under_way(self, part: PartId) -> None:
        if part.update != self.update:
            raise _refuse(f"{part} comes while update {self.update} is under way")
        if not 0 <= part.index < self._run.parts_per_update:
            raise _refuse(f"{part}: an update has {self._run.parts_per_update} parts")


def check_machine(run: TrainingRun) -> None:
    """Raise UsageError where this machine lacks what the settings of a run need."""
    if run.precision == "bf16" and not has_bf16_products():
        raise UsageError(
            "precision: this machine's processor has no instructions for bf16, which takes "
            "many times as long as fp32: train on another machine, or in another run"
        )
    SpanOptimizer(run.optimizer, {})


def _digest_boundary(inputs: Tensor, target: Tensor) -> str:
    return digest_tensors({"inputs": inputs, "target": target})


def _prepare(inputs: Tensor) -> Tensor:
    """Return inputs of which a gradient can be taken, if they are no token ids."""
    inputs = inputs.detach()
    return inputs.requires_grad_() if inputs.is_floating_point() else inputs


def _check_finite(tensor: Tensor, what: str) -> None:
    if not _is_finite(tensor):
        raise _refuse(f"the {what} are not finite")


def _is_finite(tensor: Tensor) -> bool:
    """Return whether all numbers are finite, in one pass over memory; isfinite takes several."""
    return not tensor.numel() or all(bool(end.isfinite()) for end in torch.aminmax(tensor))


def _refuse(detail: str) -> RefusedError:
    return RefusedError(ErrorCode.BAD_VALUES, detail)
