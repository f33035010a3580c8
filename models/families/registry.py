"""The model families that shoal knows, one file each; none of them computes anything."""

from collections.abc import Mapping

from . import (
    bloom,
    falcon,
    gemma,
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
from .config_reader import ConfigReader
from .family import Family
from .spec import ModelShape

_MODULES = (
    bloom,
    falcon,
    gemma,
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


def find_family(config: Mapping[str, object]) -> Family | None:
    """Return the family of this configuration, None for one without a file here."""
    return FAMILIES.get(ConfigReader(config).text("model_type", default=""))


def read_spec(config: Mapping[str, object]) -> ModelShape:
    """Return the checked spec of the model with this `config.json` content.

    A family without a file here has only a shape: its blocks are transformers' own. One that
    cannot be served in this way either is a ModelError.
    """
    family = find_family(config)
    if family is not None:
        return family.read_spec(config)
    from ...peer.engine.blocks.wrapped import read_shape  # transformers takes seconds to import

    return read_shape(config)
