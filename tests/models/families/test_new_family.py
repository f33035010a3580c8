"""The page about a new family tells the truth: it is followed to the letter."""

import ast
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, cast

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from shoal.client.model.local_layers import load_config, load_local_layers
from shoal.kernels.linear.quantize import WeightFormat
from shoal.models.checkpoints.checkpoint import Checkpoint
from shoal.models.families import registry
from shoal.peer.engine.loading.engine_loader import load_engine
from shoal.peer.engine.steps import StepWork
from shoal.protocol.spans import Span

PAGE = (Path(__file__).parents[3] / "docs" / "new-family.md").read_text(encoding="utf-8")
SHAPE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
NOVA_NAMES = {
    "model.layers.": "decoder.blocks.",
    "model.embed_tokens.": "decoder.embedding.",
    "model.norm.": "decoder.norm.",
    "lm_head.": "head.",
}


class NovaConfig(LlamaConfig):
    """What transformers would have if it knew the invented family."""

    model_type = "nova"
    attribute_map: ClassVar[dict[str, str]] = {"num_layers": "num_hidden_layers"}


def read_block(title: str) -> str:
    """Return the fenced block of the page that shows this file."""
    (block,) = re.findall(rf'^```\w+ title="{title}"\n(.*?)^```', PAGE, flags=re.M | re.S)
    return block


def apply_diff(diff: str, text: str) -> str:
    """Return the text with the changes of a diff, whose other lines must be in it."""
    for hunk in diff.split("@@\n"):
        lines = hunk.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if line[0] in "- ")
        after = "".join(line[1:] for line in lines if line[0] in "+ ")
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    return text


@pytest.fixture
def nova(monkeypatch: pytest.MonkeyPatch) -> None:
    """The invented family, added as the page says."""
    package = registry.__package__
    family, changed = ModuleType(f"{package}.nova"), ModuleType(f"{package}.changed")
    source = Path(str(registry.__file__)).read_text(encoding="utf-8")
    source = apply_diff(read_block("models/families/registry.py"), source)
    monkeypatch.setitem(sys.modules, family.__name__, family)
    for module, code in ((family, read_block("models/families/nova.py")), (changed, source)):
        module.__package__ = package
        exec(compile(code, module.__name__, "exec"), vars(module))
    families = cast(dict[str, registry.ReadSpec], registry.FAMILIES)
    monkeypatch.setitem(families, "nova", changed.FAMILIES["nova"])
    AutoConfig.register("nova", NovaConfig, exist_ok=True)


def save_model(directory: Path, model: LlamaForCausalLM) -> None:
    """Write a checkpoint as the family has them."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        prefix = next(prefix for prefix in NOVA_NAMES if name.startswith(prefix))
        tensors[NOVA_NAMES[prefix] + name.removeprefix(prefix)] = tensor.contiguous()
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    config = model.config.to_dict() | {"model_type": "nova", "dtype": "float32"}
    config["num_layers"] = config.pop("num_hidden_layers")
    del config["hidden_act"]
    (directory / "config.json").write_text(json.dumps(config))


@torch.no_grad()
def test_a_family_added_by_the_page_computes_what_transformers_does(
    nova: None, tmp_path: Path
) -> None:
    (variant,) = re.findall(r"`\"nova\": (\(.*?\)),`", PAGE)
    model_type, changes = ast.literal_eval(variant)
    settings: dict[str, Any] = {**SHAPE, **changes, "hidden_act": "gelu_pytorch_tanh"}
    torch.manual_seed(7)
    reference = LlamaForCausalLM(LlamaConfig(**settings, attention_bias=True)).eval()
    for parameter in reference.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.1)
    save_model(tmp_path, reference)
    tokens = torch.randint(0, SHAPE["vocab_size"], (2, 9))

    checkpoint, span = Checkpoint.open(tmp_path), Span(0, 3)
    assert checkpoint.config["model_type"] == model_type
    assert load_config(checkpoint).num_hidden_layers == 3
    layers = load_local_layers(checkpoint)
    engine = load_engine(checkpoint, span, WeightFormat.FP32, kv_budget_bytes=2**22)
    work = StepWork(engine.pool.open(2, 9, span), 0, layers.embedding(tokens))
    (hidden,) = engine.execute([work])

    assert isinstance(hidden, torch.Tensor), hidden
    expected = reference(tokens).logits
    torch.testing.assert_close(layers.head(layers.norm(hidden)), expected, rtol=1e-4, atol=1e-4)
    # The client's layers are far from being everything.
    assert not torch.allclose(
        layers.head(layers.norm(layers.embedding(tokens))), expected, atol=0.1
    )
