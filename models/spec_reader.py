"""Reads the spec of any model from its `config.json`, of a family with a file here or without."""

from collections.abc import Mapping

from .checkpoints.quantized import read_quantization
from .families.registry import find_family
from .specs.model_spec import ModelShape


def read_spec(config: Mapping[str, object]) -> ModelShape:
    """Return the checked spec of the model with this `config.json` content.

    A family without a file here has only a shape: its blocks are transformers' own. One that
    cannot be served in this way either is a ModelError.
    """
    read = find_family(config)
    if read is not None:
        read_quantization(config)  # a format that is not supported is refused before anything else
        return read(config)
    from .shells.shell_opening import open_shell, read_shape  # transformers takes seconds to import

    return read_shape(open_shell(config), config)
