"""Plans of runs equal the memory of real stages, and the bytes that real peers send."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from run_swarm import RunSwarm, train_in_swarm
from training_runs import MODEL, describe_run, open_run

from shoal.kernels.linear.nf4 import has_bitsandbytes
from shoal.peer.engine.training.numerics import has_bf16_products
from shoal.peer.engine.training.run_plan import RunPlan, measure_tokens_per_second, plan_run
from shoal.peer.engine.training.span_state import WEIGHTS_PREFIX, StateLayout, pick_weights
from shoal.peer.engine.training.trainable_span import TrainableSpan
from shoal.protocol.errors import UsageError
from shoal.protocol.messages.fields import Message
from shoal.protocol.messages.runs import PartPass, PartPassed, SumFetch, Sums
from shoal.protocol.runs.training_run import PartId, TrainingRun, read_run
from shoal.protocol.spans import Span

MUON: dict[str, Any] = {"optimizer": {"learning_rate": 0.01}}
UNTIED = {"model": MODEL | {"tie_word_embeddings": False, "num_hidden_layers": 3}}
GPT2 = {
    "model_type": "gpt2", "n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 96,
    "n_positions": 64, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
EIGHT_BITS = {
    "model": MODEL | {"hidden_size": 64}, "optimizer": {"name": "adamw8bit", "learning_rate": 0.01}
}  # fmt: skip
needs_bf16 = pytest.mark.skipif(not has_bf16_products(), reason="needs instructions for bf16")
needs_bitsandbytes = pytest.mark.skipif(not has_bitsandbytes(), reason="needs bitsandbytes")


@pytest.mark.parametrize(
    "changes",
    [{}, MUON, UNTIED, {"model": GPT2}, {"stage_borders": []}, {"stage_borders": [1, 3]},
     pytest.param(EIGHT_BITS, marks=needs_bitsandbytes)],
)  # fmt: skip
def test_memory_is_that_of_a_stage(changes: dict[str, Any]) -> None:
    run = read_run(describe_run(**changes))

    for plan in plan_run(run).stages:
        span = TrainableSpan(run, plan.span)
        state = span.read_state()
        weights = sum(one.nbytes for name, one in state.items() if name.startswith(WEIGHTS_PREFIX))
        assert plan.weight_bytes == weights
        assert plan.gradient_bytes == sum(one.nbytes for one in span.read_gradients().values())
        assert plan.sum_bytes == 2 * sum(one.units.nbytes for one in span.sums.values())
        optimizer = [one.nbytes for name, one in state.items() if name.startswith("optimizer/")]
        assert plan.optimizer_bytes == sum(optimizer)
        copies = [state, pick_weights(state), pick_weights(state)]
        packed = sum(StateLayout(each).num_bytes for each in copies)
        assert 0 <= packed - plan.copy_bytes <= 64 * len(state)  # what else is in a state
        assert plan.num_tied == sum(span.sums[name].units.numel() for name in span.tied_names)


def watch_bytes(run: TrainingRun, folder: Path, num_peers: int) -> tuple[int, list[int]]:
    """Train; return the bytes of all parts, and those of each time that gradients were averaged."""
    activations = 0
    attempts = dict[bytes, bytes]()
    averaged = dict[bytes, int]()

    def note(message: Message) -> bool:
        nonlocal activations
        if isinstance(message, PartPass | PartPassed):
            activations += message.num_bytes
        if isinstance(message, SumFetch):
            attempts[message.question] = message.attempt
        if isinstance(message, Sums):
            attempt = attempts[message.question]
            averaged[attempt] = averaged.get(attempt, 0) + message.num_bytes
        return False

    async def watch(swarm: RunSwarm) -> None:
        swarm.do_at(note, lambda host: None)
        swarm.do_at(lambda message: isinstance(message, PartPassed | Sums) and note(message),
                    lambda host: None, is_sent=True)  # fmt: skip

    train_in_swarm(run, folder, watch, num_peers=num_peers)
    return activations, list(averaged.values())


def count_all(plan: RunPlan, num_peers: int) -> tuple[float, float]:
    """Return what all peers send in an update, by the plan."""
    members = plan.count_members(num_peers)
    stages = range(len(members))
    activations = sum(
        members[one] * plan.count_activation_bytes(one, members[one]) for one in stages
    )
    averaging = sum(members[one] * plan.count_averaging_bytes(one, members) for one in stages)
    return activations, averaging


def test_bytes_are_those_that_peers_send(tmp_path: Path) -> None:
    run, _ = open_run(tmp_path, num_updates=2)
    plan = plan_run(run)

    activations, averaged = watch_bytes(run, tmp_path, 2)

    assert (activations / run.num_updates, averaged[-1]) == count_all(plan, 2)


def test_replicas_average_as_many_bytes_as_the_plan_says(tmp_path: Path) -> None:
    run, _ = open_run(tmp_path, num_updates=3)

    _, averaged = watch_bytes(run, tmp_path, 4)

    assert averaged[-1] == count_all(plan_run(run), 4)[1]


def test_bytes_of_int8_are_a_quarter_and_a_sixth_with_their_scales() -> None:
    exact, int8 = (
        count_all(plan_run(read_run(describe_run(mode=mode))), 4) for mode in ("exact", "int8")
    )

    assert int8[0] / exact[0] == pytest.approx((32 + 2) / 128)
    assert int8[1] / exact[1] == pytest.approx((64 + 2) / 384)


def test_what_is_slowest_bounds_the_speed() -> None:
    plan = plan_run(read_run(describe_run()))
    tokens = plan.run.tokens_per_update

    slow, fast = (plan.expect(2, each, 1000.0) for each in (1e-3, 1e9))

    assert fast.bound == "compute"
    assert fast.tokens_per_second == pytest.approx(tokens / fast.compute_seconds)
    # A pipeline of two stages needs the time of 5 parts for 4, and the stages differ by the head.
    assert 1000.0 < fast.tokens_per_second < 2 * 4 / 5 * 1000.0
    assert slow.bound == "averaging"
    more = plan.expect(4, 1e9, 1000.0)  # the time of 3 parts
    assert 5 / 3 < more.tokens_per_second / fast.tokens_per_second < 2
    with pytest.raises(UsageError, match="the run has 2 stages"):
        plan.expect(1, 100.0, 1000.0)


def test_large_model_is_planned_without_its_memory() -> None:
    model = MODEL | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 8}
    run = read_run(describe_run(model=model, stage_borders=[4]))

    stages = plan_run(run).stages

    assert stages[0].span == Span(0, 4)
    assert stages[0].weight_bytes > 10**10


def test_graphs_may_take_half_of_what_is_left_beside_the_largest_stage() -> None:
    plan = plan_run(read_run(describe_run()))
    stages = range(len(plan.stages))
    largest = max(stage.memory_bytes for stage in plan.stages)

    useful = max(stage.graph_bytes for stage in plan.stages)
    for is_beside in (False, True):
        most = plan.choose_graph_bytes(stages, largest + 2**34, is_beside=is_beside)
        assert most == useful < 2**30
        assert plan.choose_graph_bytes(stages, largest + 2**20, is_beside=is_beside) == 2**19
    assert plan.choose_graph_bytes(stages, largest) == 0


@pytest.mark.parametrize(
    "changes",
    [{}, UNTIED, {"model": GPT2}, pytest.param({"precision": "bf16"}, marks=needs_bf16)],
)
def test_graphs_of_all_parts_take_about_what_is_planned(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    run, shards = open_run(tmp_path, **changes)
    first, last = plan_run(run).stages
    span = TrainableSpan(run, first.span)

    for index in range(run.parts_per_update):
        part = PartId(0, index)
        span.run_forward(part, shards.read_part(run, part)[0])

    assert first.graph_bytes / 4 < span.graph_bytes <= first.graph_bytes
    assert last.graph_bytes == 0


def test_speed_is_measured_on_one_block() -> None:
    assert measure_tokens_per_second(read_run(describe_run()), num_threads=1) > 0
