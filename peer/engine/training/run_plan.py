"""Estimates memory, traffic and speed of a training run before any peer joins it."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ....models.shells.shell import Shell
from ....models.shells.shell_opening import open_shell
from ....protocol.errors import UsageError
from ....protocol.runs.training_run import PartId, TrainingRun
from ....protocol.spans import Span
from ....protocol.tensors import INT8_GROUP, WireDtype, compute_num_bytes
from .numerics_class import pass_random_part
from .optimizers import count_state_bytes
from .span_building import find_embedding_and_head, list_weights
from .span_state import MOST_STATE_COPIES, MOST_WEIGHT_COPIES
from .trainable_span import DEFAULT_GRAPH_BYTES, TrainableSpan

_NUMBER_BYTES = 4
_SUM_BYTES = 8
_CAST_BYTES = 2
_GRAPH_BYTES = 12
"""Bytes that the graph of a pass keeps per token and per input or output of a matrix, at most.
Graphs of Llama keep one number there, those of GPT-2 two.
"""
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True)
class StagePlan:
    """Memory and traffic of one member of a stage."""

    span: Span
    num_weights: int
    weight_bytes: int
    """Weights in float32, and what else a checkpoint has of these modules."""
    cast_bytes: int
    """Weights in bfloat16, while a part is computed in that."""
    optimizer_bytes: int
    sum_bytes: int
    """Sums of gradients, in float64, and a copy of them while an update is averaged."""
    gradient_bytes: int
    """Gradients of one part, or of the update."""
    activation_bytes: int
    """Activations and gradients that a member without mates keeps of all parts until the update is
    committed."""
    graph_bytes: int
    """Graphs that a member without mates would keep of all parts between their passes, at most, if
    it had the memory; comes on top. The last stage computes both passes at once."""
    copy_bytes: int
    """Copies that others download at the same time: of the state, and of the weights alone."""
    boundary_bytes: int
    """Bytes that a member sends to other stages for one part, and receives from them."""
    num_tied: int
    """Numbers of weights that the stage at the other end of the model holds, too."""
    num_multiplied: int
    """Numbers that each token is multiplied with."""

    @property
    def memory_bytes(self) -> int:
        """All together."""
        return sum((
            self.weight_bytes, self.cast_bytes, self.optimizer_bytes, self.sum_bytes,
            self.gradient_bytes, self.activation_bytes, self.copy_bytes,
        ))  # fmt: skip

    @property
    def alone_bytes(self) -> int:
        """The memory of a process that trains all stages alone, without the graphs of a part."""
        return self.weight_bytes + self.optimizer_bytes + self.sum_bytes // 2


@dataclass(frozen=True)
class SpeedPlan:
    """What to expect of some peers. Seconds are those of one update."""

    num_peers: int
    megabits_per_second: float
    tokens_per_second: float
    compute_seconds: float
    activation_seconds: float
    averaging_seconds: float
    bound: str
    """What takes longest: compute, activations or averaging."""


@dataclass(frozen=True)
class RunPlan:
    """All stages of a run."""

    run: TrainingRun
    stages: tuple[StagePlan, ...]
    vocabulary_size: int

    def check_alone(self, free_bytes: int) -> None:
        """Raise UsageError unless one process may train all stages in so much memory."""
        num_bytes = sum(stage.alone_bytes for stage in self.stages)
        if num_bytes > free_bytes:
            raise UsageError(
                f"training in one process takes {show_bytes(num_bytes)} of memory, and this "
                f"machine has {show_bytes(free_bytes)} left: end other programs, or train with "
                "others (--new-swarm)"
            )

    def list_fitting(self, stages: Sequence[int], free_bytes: int) -> list[int]:
        """Return which of these stages fit into so much memory. Raises UsageError if none does."""
        fitting = [one for one in stages if self.stages[one].memory_bytes <= free_bytes]
        if not fitting:
            smallest = min(stages, key=lambda one: self.stages[one].memory_bytes)
            stage = self.stages[smallest]
            raise UsageError(
                f"stage {smallest} of the run, blocks {stage.span}, takes "
                f"{show_bytes(stage.memory_bytes)} of memory, and this machine has "
                f"{show_bytes(free_bytes)} left: end other programs, or choose another stage "
                "(`shoal train-plan` lists them)"
            )
        return fitting

    def choose_graph_bytes(
        self, stages: Sequence[int], free_bytes: int, *, is_beside: bool = False
    ) -> int:
        """Return the limit of graphs of passes under way, beside the largest of these stages.

        Half of what is left stays free, as passes beyond the limit are only slower: their graphs
        are computed again. Nothing is reserved, and no more taken than the parts of an update need.
        `is_beside`: the process serves blocks, too, which do without the limit: so it is smaller.
        """
        left = max(free_bytes - max(self.stages[one].memory_bytes for one in stages), 0) // 2
        limit = min(left, max(self.stages[one].graph_bytes for one in stages))
        return min(limit, DEFAULT_GRAPH_BYTES) if is_beside else limit

    def count_members(self, num_peers: int) -> list[int]:
        """Return how many of the peers hold each stage: they join where the fewest are."""
        num_stages = len(self.stages)
        if num_peers < num_stages:
            raise UsageError(f"the run has {num_stages} stages, and needs as many peers at least")
        return [len(range(stage, num_peers, num_stages)) for stage in range(num_stages)]

    def count_activation_bytes(self, stage: int, num_members: int) -> float:
        """Return what a member sends for parts in an update, on average; it gets as much."""
        return self.run.parts_per_update / num_members * self.stages[stage].boundary_bytes

    def count_averaging_bytes(self, stage: int, members: list[int]) -> float:
        """Return what a member sends to average an update; it gets as much.

        Each slice goes to the member that sums it, and from there to all others.
        """
        plan = self.stages[stage]
        numbers = _count_butterfly_numbers(plan.num_weights - plan.num_tied, members[stage])
        numbers += _count_butterfly_numbers(plan.num_tied, members[0] + members[-1])
        is_exact = self.run.mode == "exact"
        # Half of them to the members that sum them, and half from there.
        return numbers * ((_SUM_BYTES + _NUMBER_BYTES) / 2 if is_exact else 1 + 2 / INT8_GROUP)

    def expect(
        self, num_peers: int, megabits_per_second: float, tokens_per_second: float
    ) -> SpeedPlan:
        """Return what peers come to that compute so many tokens per second of the whole model.

        Their lines carry so much in each direction. Parts are computed while others are sent;
        averaging follows. The slowest stage waits for the others only while the first part comes to
        it, and the others for the last part. Delays are left out.
        """
        members = self.count_members(num_peers)
        seconds_per_byte = 8 / (megabits_per_second * 1e6)
        tokens = self.run.tokens_per_update
        whole = sum(stage.num_multiplied for stage in self.stages)
        num_parts, activation, averaging = self.run.parts_per_update, 0.0, 0.0
        part_seconds = tokens / num_parts / tokens_per_second
        once = [part_seconds * stage.num_multiplied / whole for stage in self.stages]
        compute = max(
            sum(once) + (math.ceil(num_parts / members[index]) - 1) * seconds
            for index, seconds in enumerate(once)
        )
        for index in range(len(self.stages)):
            sent = self.count_activation_bytes(index, members[index])
            activation = max(activation, sent * seconds_per_byte)
            averaged = self.count_averaging_bytes(index, members)
            averaging = max(averaging, averaged * seconds_per_byte)
        seconds = {"compute": compute, "activations": activation, "averaging": averaging}
        total = max(compute, activation) + averaging
        bound = max(seconds, key=lambda name: seconds[name])
        return SpeedPlan(
            num_peers, megabits_per_second, tokens / total, compute, activation, averaging, bound
        )


def plan_run(run: TrainingRun) -> RunPlan:
    """Return what a run needs; takes no memory for weights. Raises UsageError, ModelError."""
    shell = open_shell(run.model)
    spans = run.list_stages(len(shell.layers))
    num_positions = getattr(shell.config, "max_position_embeddings", None)
    if isinstance(num_positions, int) and 0 < num_positions < run.corpus.sequence_length:
        raise UsageError(
            f"corpus.sequence_length: the model has {num_positions} positions "
            f"(max_position_embeddings in its config.json), not {run.corpus.sequence_length}"
        )
    embedding, _ = find_embedding_and_head(shell)
    stages = tuple(_plan_stage(run, shell, span) for span in spans)
    return RunPlan(run, stages, embedding.num_embeddings)


def measure_tokens_per_second(
    run: TrainingRun, num_threads: int, free_bytes: float = math.inf
) -> float:
    """Return how many tokens of the whole model this machine trains per second.

    Measured on one block, so that it takes no memory for the others. Raises UsageError where that
    takes more than the free memory.
    """
    shell = open_shell(run.model)
    middle = len(shell.layers) // 2
    measured = Span(middle, middle + 1)
    num_bytes = _plan_stage(run, shell, measured).alone_bytes
    if num_bytes > free_bytes:
        raise UsageError(
            f"one block of the model takes {show_bytes(num_bytes)} of memory, and this machine has "
            f"{show_bytes(free_bytes)} left to measure its speed: give --tokens-per-second"
        )
    span = TrainableSpan(run, measured, num_threads=num_threads)
    seconds = math.inf
    for index in range(min(3, run.parts_per_update)):  # the first one is slower
        begun_at = time.perf_counter()
        pass_random_part(run, span, PartId(0, index))
        seconds = min(seconds, time.perf_counter() - begun_at)
    whole = sum(stage.num_multiplied for stage in plan_run(run).stages)
    block = _plan_stage(run, shell, span.span).num_multiplied
    tokens_per_part = run.rows_per_part * run.corpus.sequence_length
    return tokens_per_part / seconds * block / whole


def _plan_stage(run: TrainingRun, shell: Shell, span: Span) -> StagePlan:
    embedding, head = find_embedding_and_head(shell)
    is_first, is_last = span.start == 0, span.stop == len(shell.layers)
    tensors = list_weights(shell, span)
    weights = {name: one for name, one in tensors.items() if one.requires_grad}
    other_bytes = sum(one.nbytes for name, one in tensors.items() if name not in weights)
    num_weights = sum(weight.numel() for weight in weights.values())
    is_tied = head.weight is embedding.weight and is_first != is_last
    num_multiplied = num_weights
    if is_first and not (is_last and head.weight is embedding.weight):
        num_multiplied -= embedding.weight.numel()  # its rows are looked up
    hidden_size = shell.config.hidden_size
    part_bytes = _NUMBER_BYTES * run.rows_per_part * run.corpus.sequence_length * hidden_size
    dtype = WireDtype.FP32 if run.mode == "exact" else WireDtype.INT8
    sent_bytes = compute_num_bytes(
        dtype, run.rows_per_part, run.corpus.sequence_length, hidden_size
    )
    num_borders = (not is_first) + (not is_last)
    ends = (embedding.weight, head.weight)
    num_kept = sum(
        sum(weight.shape)
        for weight in weights.values()
        if weight.ndim > 1 and all(weight is not end for end in ends)
    )
    weight_bytes = _NUMBER_BYTES * num_weights + other_bytes
    cast_bytes = _CAST_BYTES * num_multiplied if run.precision == "bf16" else 0
    graph_bytes = run.tokens_per_update * num_kept * _GRAPH_BYTES
    graph_bytes += run.parts_per_update * cast_bytes  # each has its own
    optimizer_bytes = count_state_bytes(run.optimizer, weights)
    state_bytes = weight_bytes + optimizer_bytes
    return StagePlan(
        span,
        num_weights,
        weight_bytes=weight_bytes,
        cast_bytes=cast_bytes,
        optimizer_bytes=optimizer_bytes,
        sum_bytes=2 * _SUM_BYTES * num_weights,
        gradient_bytes=_NUMBER_BYTES * num_weights,
        activation_bytes=run.parts_per_update * num_borders * part_bytes,
        graph_bytes=0 if is_last else graph_bytes,
        copy_bytes=MOST_STATE_COPIES * state_bytes + MOST_WEIGHT_COPIES * weight_bytes,
        boundary_bytes=num_borders * sent_bytes,
        num_tied=embedding.weight.numel() if is_tied else 0,
        num_multiplied=num_multiplied,
    )


def _count_butterfly_numbers(num_numbers: int, num_members: int) -> float:
    return 2 * num_numbers * (num_members - 1) / max(num_members, 1)


def show_bytes(num_bytes: float) -> str:
    """Return a size for people.

    >>> show_bytes(2**20), show_bytes(3 * 2**40)
    ('1.0M', '3,072.0G')
    """
    unit = next((one for one in ("K", "M") if num_bytes < 1000 * _UNITS[one]), "G")
    return f"{num_bytes / _UNITS[unit]:,.1f}{unit}"
