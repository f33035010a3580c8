"""The model families that shoal computes itself, by the `model_type` of `config.json`.

Everything about a family is in its file, and its name is here. How to add one: docs/new-family.md.
"""

from collections.abc import Callable, Mapping

from ..specs.config_reader import ConfigReader
from ..specs.model_spec import ModelSpec
from . import bloom, falcon, gemma, gpt2, llama, mistral, mixtral, phi3, qwen

ReadSpec = Callable[[Mapping[str, object]], ModelSpec]
"""Returns the checked spec of a model with this `config.json` content; raises ModelError."""

FAMILIES: Mapping[str, ReadSpec] = {
    "bloom": bloom.read_spec,
    "falcon": falcon.read_spec,
    "gemma": gemma.read_gemma1,
    "gemma2": gemma.read_gemma2,
    "gemma3_text": gemma.read_gemma3,
    "gpt2": gpt2.read_spec,
    "llama": llama.read_spec,
    "mistral": mistral.read_spec,
    "mixtral": mixtral.read_spec,
    "phi3": phi3.read_spec,
    "qwen2": qwen.read_qwen2,  # Qwen 2.5 as well
    "qwen3": qwen.read_qwen3,
    "qwen3_moe": qwen.read_qwen3_moe,
}


def find_family(config: Mapping[str, object]) -> ReadSpec | None:
    """Return what reads a configuration of this family, None for a family without a file here."""
    return FAMILIES.get(ConfigReader(config).text("model_type", default=""))
