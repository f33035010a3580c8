"""Checkpoints under the names that transformers' modules have today.

Some families were published with other names, or with a tensor for each expert where the module
has one for all. Transformers knows how to get from there to here; this asks it tensor by tensor.
"""

from collections import defaultdict
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from ...protocol.errors import ModelError
from .checkpoint import Checkpoint


class ConvertedCheckpoint:
    """A checkpoint as `model` names and joins its tensors; nothing is read before it is asked for.

    The sources of a tensor are the stored ones that it is made of, in their order, each with the
    pattern of its name in a conversion, or None if it is only called otherwise.
    """

    def __init__(self, checkpoint: Checkpoint, model: PreTrainedModel) -> None:
        self._checkpoint = checkpoint
        self._model = model
        transforms = get_model_conversion_mapping(model)
        renamings: Any = [each for each in transforms if isinstance(each, WeightRenaming)]
        converters: Any = [each for each in transforms if isinstance(each, WeightConverter)]
        self._converter_of = {
            pattern: converter for converter in converters for pattern in converter.source_patterns
        }
        self._sources: dict[str, list[tuple[str, str | None]]] = defaultdict(list)
        for stored in sorted(checkpoint.names, key=dot_natural_key):
            name, pattern = rename_source_key(stored, renamings, converters)
            self._sources[name].append((stored, pattern))

    def has(self, name: str) -> bool:
        """Return whether a tensor of this name is stored, or can be made."""
        return name in self._sources or self._checkpoint.has(name)

    def load(self, name: str) -> Tensor:
        """Return one tensor; a missing or unfit part of it is a ModelError."""
        sources = self._sources.get(name)
        if not sources or self._checkpoint.has(name):
            return self._checkpoint.load(name)
        pattern = sources[0][1]
        if pattern is None:
            return self._checkpoint.load(sources[0][0])
        # All of them first: a converter keeps what it was given until it is done.
        parts = [(stored, part, self._checkpoint.load(stored)) for stored, part in sources]
        converter = self._converter_of[pattern]
        try:
            for stored, part, tensor in parts:
                converter.add_tensor(name, stored, part, tensor)
            (tensor,) = converter.convert(name, self._model, self._model.config).values()
        except (RuntimeError, ValueError, LookupError, TypeError) as error:
            raise ModelError(
                f"tensor {name!r} cannot be joined from its parts in {self._checkpoint.directory}; "
                "download the model again"
            ) from error
        return tensor
