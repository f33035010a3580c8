"""What learns in a run is what it began with, or the run does not go on."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from shoal.client.finetuning.learners import AdapterLearner
from shoal.client.training.lora import LoraAdapter
from shoal.protocol.errors import UsageError


def test_adapter_of_other_linears_is_told_by_its_facts_and_refused(
    tiny_models: Any, tmp_path: Path
) -> None:
    model = copy.deepcopy(tiny_models.get().reference)
    model.config.dht_prefix = "00" * 16
    first, same, other = (
        AdapterLearner(model, LoraAdapter.create(model, target_modules=targets, seed=seed))
        for targets, seed in ((["q_proj"], 0), (["q_proj"], 1), (["o_proj"], 0))
    )
    part = AdapterLearner(model, LoraAdapter.create(model, target_modules=r".*\.0\..*q_proj"))
    first.save(tmp_path)

    assert first.facts == same.facts
    assert first.facts != other.facts
    same.load(tmp_path)
    before = dict(first.facts)
    model.config.dht_prefix = "01" * 16  # other weights of the same name
    assert first.facts != before
    for learner in (other, part):
        with pytest.raises(UsageError, match="has other target modules than this run"):
            learner.load(tmp_path)
