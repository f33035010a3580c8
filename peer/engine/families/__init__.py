"""The model families that shoal knows, one file each; none of them computes anything."""

from collections.abc import Mapping

from ....protocol.errors import ModelError
from ..config_reader import ConfigReader
from ..spec import ModelSpec
from . import (
    bloom,
    falcon,
    gemma2,
    gemma3,
    gpt2,
    llama,
    mistral,
    mixtral,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
)
from .family import Family

_MODULES = (
    bloom,
    falcon,
    gemma2,
    gemma3,
    gpt2,
    llama,
    mistral,
    mixtral,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
)

FAMILIES: Mapping[str, Family] = {module.FAMILY.name: module.FAMILY for module in _MODULES}
"""By the `model_type` of `config.json`. Qwen 2.5 calls itself qwen2."""


def find_family(config: Mapping[str, object]) -> Family:
    """Return the family of this configuration; an unknown one is a ModelError."""
    name = ConfigReader(config).text("model_type", default="")
    if name not in FAMILIES:
        raise ModelError(
            f"model family {name!r} is not supported; supported are {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[name]


def read_spec(config: Mapping[str, object]) -> ModelSpec:
    """Return the checked spec of the model with this `config.json` content."""
    return find_family(config).read_spec(config)
