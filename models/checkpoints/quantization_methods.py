"""Chooses how to read a checkpoint that comes quantized, by what its `config.json` says."""

from collections.abc import Callable, Mapping

from .awq import AwqLinears
from .checkpoint import CheckpointError
from .compressed_tensors import CompressedLinears
from .gptq import GptqLinears
from .quantized_checkpoint import QuantizedLinears, as_mapping

_METHODS: Mapping[str, Callable[[Mapping[str, object]], QuantizedLinears]] = {
    "awq": AwqLinears,
    "compressed-tensors": CompressedLinears,
    "gptq": GptqLinears,
}
"""By the `quant_method` of `quantization_config`."""

_CONFIG_NAMES = ("quantization_config", "compression_config")
"""The second is what compressed-tensors wrote before."""


def read_quantization(config: Mapping[str, object]) -> QuantizedLinears | None:
    """Return how the linears of this checkpoint are stored, None if they are plain tensors.

    Raises CheckpointError for what cannot be read, before any weight is.
    """
    name = next((name for name in _CONFIG_NAMES if config.get(name) is not None), None)
    if name is None:
        return None
    settings = as_mapping(config[name], name)
    method = settings.get("quant_method")
    if not isinstance(method, str) or method not in _METHODS:
        raise CheckpointError(
            f"this checkpoint is quantized already, with quant_method {method!r:.60}, which is not "
            f"supported; use the original one, or one made with {', '.join(_METHODS)}"
        )
    return _METHODS[method](settings)
