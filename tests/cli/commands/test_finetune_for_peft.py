"""What a peft user does: learn through a swarm, and open the folder in plain transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from shoal.cli.main import main
from shoal.cli.options.bundled_model import BUNDLED_NAME, find_model
from shoal.peer.local_swarm.swarm import LocalSwarm

peft = pytest.importorskip("peft")

pytestmark = [
    pytest.mark.network,
    pytest.mark.slow,
    # peft's own affair.
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Setting .save_embedding_layers.:UserWarning"),
]

PROMPT = "Mia has a kite."


@pytest.fixture(scope="module")
def swarm() -> Iterator[LocalSwarm]:
    """Two peers that compute as plain transformers does, in 32 bits."""
    with LocalSwarm(find_model(), spans=[(0, 4), (4, 8)], weights="fp32") as swarm:
        yield swarm


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(find_model())


@pytest.fixture(scope="module")
def adapter(swarm: LocalSwarm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `shoal finetune` left."""
    folder = tmp_path_factory.mktemp("finetune")
    rows = [f"{name} has a {thing}. Ahoy!" for name in ("Ella", "Tom") for thing in ("hat", "drum")]
    (folder / "data.txt").write_text("\n\n".join(4 * rows))
    command = ["finetune", BUNDLED_NAME, "--data", str(folder / "data.txt"), "--method", "lora"]
    command += ["--out", str(folder / "out"), "--updates", "12", "--learning-rate", "0.01"]
    assert main([*command, "--initial-peers", swarm.initial_peers[0], "--json"]) == 0
    return folder / "out"


def open_with_peft(folder: Path) -> Any:
    base = AutoModelForCausalLM.from_pretrained(find_model(), dtype=torch.float32)
    return peft.PeftModel.from_pretrained(base, folder).eval()


def generate_with_peft(folder: Path, tokenizer: Any) -> str:
    inputs = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    output = open_with_peft(folder).generate(**inputs, max_new_tokens=12, do_sample=False)
    return tokenizer.decode(output[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)


def generate_with_shoal(folder: Path, swarm: LocalSwarm, capsys: Any) -> str:
    capsys.readouterr()  # what loading said
    command = ["generate", BUNDLED_NAME, PROMPT, "--adapter", str(folder), "--json"]
    command += ["--max-new-tokens", "12", "--initial-peers", swarm.initial_peers[0]]
    assert main(command) == 0
    return json.loads(capsys.readouterr().out)["text"]


def test_folder_writes_the_same_text_in_plain_transformers_and_peft(
    swarm: LocalSwarm, adapter: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    text = generate_with_peft(adapter, tokenizer)

    assert text.startswith(" Ahoy!")
    assert generate_with_shoal(adapter, swarm, capsys) == text


def test_adapter_made_by_peft_generates_through_a_swarm(
    swarm: LocalSwarm, tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = AutoModelForCausalLM.from_pretrained(find_model(), dtype=torch.float32)
    config = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "down_proj"])
    model = peft.get_peft_model(base, config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, matrix in model.named_parameters():
            if "lora_" in name:
                matrix.copy_(0.2 * torch.randn(matrix.shape, generator=generator))
    model.save_pretrained(tmp_path)

    text = generate_with_peft(tmp_path, tokenizer)

    assert generate_with_shoal(tmp_path, swarm, capsys) == text
