"""Runs with 8-bit AdamW, and in bf16: one digest, also with a member that took a mate's state."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from run_swarm import RunSwarm, train_in_swarm
from training_runs import MODEL, describe_run, open_run, train_alone

from shoal.kernels.linear.nf4 import has_bitsandbytes
from shoal.peer.engine.training.numerics import has_bf16_products
from shoal.peer.engine.training.numerics_class import compute_class_digest
from shoal.protocol.errors import UsageError
from shoal.protocol.runs.training_run import read_run

OPTIMIZER = {"name": "adamw8bit", "learning_rate": 0.01, "weight_decay": 0.05}
WIDE = MODEL | {"hidden_size": 64, "intermediate_size": 96}
"""Whose matrices are large enough for moments in 8 bits."""


needs_bitsandbytes = pytest.mark.skipif(not has_bitsandbytes(), reason="needs bitsandbytes")
needs_bf16 = pytest.mark.skipif(not has_bf16_products(), reason="needs instructions for bf16")


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"optimizer": OPTIMIZER}, marks=needs_bitsandbytes, id="adamw8bit"),
        pytest.param({"precision": "bf16"}, marks=needs_bf16, id="bf16"),
    ],
)
def test_weights_have_one_digest_with_a_member_that_takes_the_state_of_a_mate(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    run, shards = open_run(tmp_path, model=WIDE, **changes)
    alone = train_alone(run, shards)

    async def scene(swarm: RunSwarm) -> None:
        await swarm.wait_for_update(1)
        swarm.slow = dict.fromkeys(swarm.peers, 30.0)  # it is there before the last update
        await swarm.kill("peer2")
        await swarm.start("newcomer", 0)

    assert train_in_swarm(run, tmp_path, num_peers=2) == alone
    assert train_in_swarm(run, tmp_path, scene, num_peers=4) == alone


def test_machine_without_the_library_is_refused_before_it_joins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    run = read_run(describe_run(optimizer=OPTIMIZER))

    with pytest.raises(UsageError, match=r"optimizer\.name: 8-bit AdamW needs bitsandbytes: pip"):
        compute_class_digest(run, num_threads=1)
