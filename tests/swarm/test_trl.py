"""TRL's trainers train an adapter over a swarm as they train PEFT's over plain transformers."""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from shoal.client import AutoDistributedModelForCausalLM, LoraAdapter
from shoal.peer.local_swarm.loopback import LoopbackSwarm

MODEL = Path(__file__).parents[2] / "models" / "shoal-stories"
TEXTS = [
    {"prompt": "Once upon", "completion": " a time there was a cat."},
    {"prompt": "The little dog", "completion": " was big."},
]
CHOICES = [
    {"prompt": "Once upon", "chosen": " a time there was a cat.", "rejected": " the the"},
    {"prompt": "The little dog", "chosen": " was happy.", "rejected": " cat of"},
]

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


def train(kind: str, model: Any, reference: Any, folder: Path) -> list[float]:
    """Return the losses of two updates."""
    trl: Any = importlib.import_module("trl")  # takes seconds, and exports lazily
    settings: dict[str, Any] = {
        "output_dir": str(folder), "max_steps": 2, "per_device_train_batch_size": 2,
        "report_to": [], "use_cpu": True, "learning_rate": 1e-2, "bf16": False,
        "logging_steps": 1, "disable_tqdm": True, "save_strategy": "no",
        "gradient_checkpointing": False, "seed": 1,
    }  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if kind == "sft":
            trainer: Any = trl.SFTTrainer(
                model, trl.SFTConfig(**settings), train_dataset=Dataset.from_list(TEXTS),
                processing_class=tokenizer,
            )  # fmt: skip
        else:
            trainer = trl.DPOTrainer(
                model, reference, args=trl.DPOConfig(**settings),
                train_dataset=Dataset.from_list(CHOICES), processing_class=tokenizer,
            )  # fmt: skip
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def open_model() -> Any:
    swarm = LoopbackSwarm(MODEL, spans=[(0, 4), (4, 8)], weights="fp32")
    return AutoDistributedModelForCausalLM.from_pretrained(
        MODEL, connect=swarm.connect, torch_dtype="fp32"
    )


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_trainer_learns_as_over_plain_transformers(kind: str, tmp_path: Path) -> None:
    with open_model() as model, open_model() as frozen:
        adapter = LoraAdapter.create(model, rank=4, target_modules=["q_proj", "v_proj"])
        adapter.save(tmp_path / "adapter")
        model.active_adapter = adapter
        found = train(kind, model, frozen, tmp_path)
        learned = adapter.copy_matrices()

    plain: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    tuned = PeftModel.from_pretrained(plain, tmp_path / "adapter", is_trainable=True)
    expected = train(kind, tuned, None, tmp_path)

    assert found == pytest.approx(expected, rel=1e-3)
    assert found[1] < found[0]
    for name, matrix in tuned.state_dict().items():
        if ".default." in name:
            ours = learned[name.replace(".default", "")]
            torch.testing.assert_close(ours, matrix, rtol=0.02, atol=1e-3)
