"""The model families that shoal knows, one file each; none of them computes anything."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ....protocol.errors import ModelError
from ..spec import ConfigReader, ModelSpec
from . import llama, mistral, qwen2, qwen3


@dataclass(frozen=True)
class Family:
    """How one family's `config.json` is read and what its checkpoints call a block's tensors.

    `tensor_names` maps block-local names to names below `prefix`, where `{block}` is the index.
    """

    read_spec: Callable[[Mapping[str, object]], ModelSpec]
    prefix: str
    tensor_names: Mapping[str, str]

    def checkpoint_name(self, block: int, local_name: str) -> str:
        """Return what the checkpoint calls a block-local tensor."""
        return self.prefix.format(block=block) + self.tensor_names[local_name]


FAMILIES: Mapping[str, Family] = {
    module.NAME: Family(module.read_spec, module.PREFIX, module.TENSOR_NAMES)
    for module in (llama, mistral, qwen2, qwen3)
}
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
