"""A training run in one process: every stage has one replica, which computes every part.

The reference for runs over a swarm: what they compute has to be equal to this, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from statistics import fmean

from torch import Tensor

from ....models.shells.shell_opening import open_shell
from ....models.token_shards import TokenShards
from ....protocol.runs.training_run import PartId, TrainingRun
from .span_building import find_embedding_and_head
from .span_state import digest_tensors
from .trainable_span import TrainableSpan


@dataclass(frozen=True)
class Update:
    """What an update did: its mean loss in nats per token, and the norm of its gradient."""

    number: int
    loss: float
    gradient_norm: float


class WholeRun:
    """All stages of a run."""

    def __init__(self, run: TrainingRun, num_threads: int = 1) -> None:
        shell = open_shell(run.model)
        self._run = run
        embedding, _ = find_embedding_and_head(shell)
        self.vocabulary_size = embedding.num_embeddings
        self.architecture = type(shell.model).__name__
        """The name of the model's class in transformers."""
        self.stages = [
            TrainableSpan(run, span, num_threads=num_threads)
            for span in run.list_stages(len(shell.layers))
        ]

    def train(self, shards: TokenShards, left_out: Collection[PartId] = ()) -> Iterator[Update]:
        """Compute one update after the other until the last of the run.

        Parts that are `left_out` show what a lost one changes.
        """
        for number in range(self.stages[0].update, self._run.num_updates):
            yield self._compute_update(number, shards, left_out)

    def measure_held_out_loss(self, shards: TokenShards) -> float:
        """Return the mean loss on the held-out shards, in nats per token."""
        return fmean(
            self._evaluate_part(index, shards) for index in range(self._run.num_held_out_parts)
        )

    def _evaluate_part(self, index: int, shards: TokenShards) -> float:
        inputs, labels = shards.read_held_out(self._run, index)
        *before, last = self.stages
        for stage in before:
            inputs = stage.evaluate(stage.update, inputs)
        return last.evaluate_loss(last.update, inputs, labels)

    def compute_weights_digest(self) -> str:
        """Return the SHA-256 of the weights of the model, 64 hexadecimal digits."""
        return digest_tensors(self.read_weights())

    def read_weights(self) -> dict[str, Tensor]:
        """Return the weights of the model by their names in a checkpoint."""
        return {
            name: weight for stage in self.stages for name, weight in stage.read_weights().items()
        }

    def compute_gradients(
        self, number: int, shards: TokenShards, left_out: Collection[PartId] = ()
    ) -> float:
        """Compute all parts of an update, and leave their sums in the stages; return its loss."""
        parts = [PartId(number, index) for index in range(self._run.parts_per_update)]
        loss = sum(self._compute_part(part, shards) for part in parts if part not in left_out)
        self._merge_tied()
        return loss

    def _compute_update(
        self, number: int, shards: TokenShards, left_out: Collection[PartId]
    ) -> Update:
        loss = self.compute_gradients(number, shards, left_out)
        gradients = [stage.read_gradients() for stage in self.stages]
        pairs = list(zip(self.stages, gradients, strict=True))
        squared_norm = math.fsum(stage.measure_squared_norm(own) for stage, own in pairs)
        for stage, own in pairs:
            stage.apply_update(own, squared_norm)
        return Update(number, loss, squared_norm**0.5)

    def _compute_part(self, part: PartId, shards: TokenShards) -> float:
        inputs, labels = shards.read_part(self._run, part)
        *before, last = self.stages
        for stage in before:
            inputs = stage.run_forward(part, inputs)
        result = last.run_loss(part, inputs, labels)
        grads = result.input_grads_BTH
        for stage in reversed(before):
            assert grads is not None
            grads = stage.run_backward(part, grads).input_grads_BTH
        assert result.loss is not None
        return result.loss

    def _merge_tied(self) -> None:
        """Sum the gradients of a weight that two stages hold, in both of them."""
        first, last = self.stages[0], self.stages[-1]
        if first is last:
            return
        for name in first.sums.keys() & last.sums.keys():
            one, other = first.sums[name], last.sums[name]
            one.merge(other.units, other.num_addends)
            other.load(one.units, one.num_addends)
