"""Typed, bounded access to `config.json`, and the fields that several families spell in one way."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar, cast

import torch

from ...protocol.errors import ModelError
from ...protocol.limits import MAX_BLOCKS, MAX_HIDDEN_SIZE

MAX_HEADS = 4096
MAX_HEAD_DIM = 1024
MAX_INTERMEDIATE_SIZE = 2**20
MAX_POSITIONS = 2**24
MAX_VOCABULARY = 2**24
MAX_EXPERTS = 4096

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""The types of stored weights, by their names in `config.json`."""

_SCALED_BY_ORIGINAL_LENGTH = ("llama3", "yarn", "longrope")

Item = TypeVar("Item")

_FULL, _SLIDING = "full_attention", "sliding_attention"
"""Of `layer_types`."""


class ConfigReader:
    """Typed, bounded access to the values of a `config.json`; every complaint is a ModelError."""

    def __init__(self, config: Mapping[str, object]) -> None:
        self._config = config

    def has(self, name: str) -> bool:
        """Return whether the value is there and not null."""
        return self._config.get(name) is not None

    def count(self, name: str, maximum: int, default: int | None = None) -> int:
        """Return a whole number in 1..maximum."""
        value = self._config[name] if self.has(name) else default
        if value is None:
            raise ModelError(f"config.json has no {name}")
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= maximum:
            raise ModelError(
                f"config.json: {name} must be a whole number in 1..{maximum}, got {value!r}"
            )
        return value

    def number(self, name: str, default: float) -> float:
        """Return a positive finite number."""
        value = self._config[name] if self.has(name) else default
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e30:
            raise ModelError(f"config.json: {name} must be a positive number, got {value!r}")
        return float(value)

    def number_or_none(self, name: str, default: float | None) -> float | None:
        """Return a positive finite number; null means None, silence the default."""
        if default is None or name in self._config:
            return self.number(name, default=1.0) if self.has(name) else None
        return default

    def flag(self, name: str, default: bool) -> bool:
        """Return true or false."""
        value = self._config[name] if self.has(name) else default
        if not isinstance(value, bool):
            raise ModelError(f"config.json: {name} must be true or false, got {value!r}")
        return value

    def text(self, name: str, default: str) -> str:
        """Return a short text."""
        value = self._config[name] if self.has(name) else default
        if not isinstance(value, str):
            raise ModelError(f"config.json: {name} must be a string, got {value!r:.60}")
        return value

    def texts(self, name: str) -> list[str]:
        """Return a list of texts."""
        return self._list(name, str, "strings")

    def indices(self, name: str) -> frozenset[int]:
        """Return a list of block indices as a set, empty if there is none."""
        return frozenset(self._list(name, int, "block indices"))

    def _list(self, name: str, kind: type[Item], what: str) -> list[Item]:
        value = self._config.get(name) or []
        if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
            raise ModelError(f"config.json: {name} must be a list of {what}")
        return cast(list[Item], value)

    def dtype(self) -> torch.dtype:
        """Return the dtype that the weights were published in."""
        name = self.text("dtype", default=self.text("torch_dtype", default="float32"))
        if name not in DTYPES:
            raise ModelError(f"config.json: dtype {name!r} is not one of {', '.join(DTYPES)}")
        return DTYPES[name]

    def mapping(self, name: str) -> dict[str, object]:
        """Return a JSON object, empty if there is none."""
        value = self._config.get(name) or {}
        if not isinstance(value, dict):
            raise ModelError(f"config.json: {name} must be an object, got {value!r:.60}")
        return dict(cast(dict[str, object], value))


def rename_fields(config: Mapping[str, object], names: Mapping[str, str]) -> dict[str, object]:
    """Return the configuration with the fields in `names` under the names most families use.

    >>> rename_fields({"n_layer": 2}, {"n_layer": "num_hidden_layers"})
    {'num_hidden_layers': 2}
    """
    renamed = {names[name]: value for name, value in config.items() if name in names}
    return {name: value for name, value in config.items() if name not in names} | renamed


def read_common_fields(config: Mapping[str, object]) -> dict[str, Any]:
    """Return the fields of a ModelSpec that every family here spells in one way.

    The rotation covers whole heads unless it is scaled: for all of these families but Phi-3,
    transformers ignores `partial_rotary_factor` otherwise.
    """
    reader = ConfigReader(config)
    hidden_size = reader.count("hidden_size", MAX_HIDDEN_SIZE)
    num_heads = reader.count("num_attention_heads", MAX_HEADS)
    if not reader.has("head_dim") and hidden_size % num_heads:
        raise ModelError(
            f"config.json: hidden_size {hidden_size} is no multiple of {num_heads} heads"
        )
    rope, max_positions = limit_to_exact_positions(
        cover_whole_heads(read_rope_parameters(config)),
        reader.count("max_position_embeddings", MAX_POSITIONS),
    )
    return {
        "family": reader.text("model_type", default=""),
        "hidden_size": hidden_size,
        "num_blocks": reader.count("num_hidden_layers", MAX_BLOCKS),
        "num_heads": num_heads,
        "num_kv_heads": reader.count("num_key_value_heads", MAX_HEADS, default=num_heads),
        "head_dim": reader.count("head_dim", MAX_HEAD_DIM, max(1, hidden_size // num_heads)),
        "intermediate_size": reader.count("intermediate_size", MAX_INTERMEDIATE_SIZE),
        "norm_eps": reader.number("rms_norm_eps", default=1e-6),
        "rope_parameters": rope,
        "max_positions": max_positions,
        "vocab_size": reader.count("vocab_size", MAX_VOCABULARY),
        "tie_word_embeddings": reader.flag("tie_word_embeddings", default=False),
        "dtype": reader.dtype(),
        "activation": reader.text("hidden_act", default="silu"),
    }


def read_rope_parameters(config: Mapping[str, object]) -> Mapping[str, object]:
    """Return the rotary parameters as transformers 5 spells them.

    Checkpoints of transformers 4 have `rope_theta` beside `rope_scaling`, whose kind is called
    "type" or "rope_type"; those of transformers 5 have everything in `rope_parameters`.
    """
    reader = ConfigReader(config)
    parameters = reader.mapping("rope_scaling") or reader.mapping("rope_parameters")
    if any(isinstance(value, dict) for value in parameters.values()):
        raise ModelError("config.json: rotary parameters that differ by block are not supported")

    parameters.setdefault("rope_type", parameters.pop("type", "default"))
    parameters.pop("type", None)
    parameters.setdefault("rope_theta", reader.number("rope_theta", default=10_000.0))
    if reader.has("partial_rotary_factor"):
        parameters.setdefault("partial_rotary_factor", reader.number("partial_rotary_factor", 1.0))
    if parameters["rope_type"] in _SCALED_BY_ORIGINAL_LENGTH:
        _find_original_length(reader, parameters)
    return MappingProxyType(parameters)


def cover_whole_heads(rope: Mapping[str, object]) -> Mapping[str, object]:
    """Return a rotation that ignores `partial_rotary_factor` unless it is scaled."""
    if rope["rope_type"] != "default":
        return rope
    return MappingProxyType({k: v for k, v in rope.items() if k != "partial_rotary_factor"})


def _find_original_length(reader: ConfigReader, parameters: dict[str, object]) -> None:
    """Complete the parameters of a rotation that is scaled from the length of the pretraining."""
    name = "original_max_position_embeddings"
    if reader.has(name):
        # As in transformers, what stands beside the rotary parameters counts more than what is
        # among them.
        parameters[name] = reader.count(name, MAX_POSITIONS)
    parameters.setdefault(name, reader.count("max_position_embeddings", MAX_POSITIONS))


def limit_to_exact_positions(
    rope: Mapping[str, object], max_positions: int
) -> tuple[Mapping[str, object], int]:
    """Return a rotation and how many positions it serves: fewer than the model's if it is long.

    A long rotation turns every key anew once a text outgrows the length of the pretraining, also
    those that wait in a cache. Up to that length it is exact.
    """
    original = rope.get("original_max_position_embeddings")
    if rope["rope_type"] != "longrope" or not isinstance(original, int) or original < 1:
        return rope, max_positions
    factor = rope.get("factor") or max_positions / original
    return MappingProxyType({**rope, "factor": factor}), min(max_positions, original)


def read_one_window(
    config: Mapping[str, object], num_blocks: int, default: int | None
) -> tuple[int | None, ...]:
    """Return the one window of all blocks; null means full attention, silence the default."""
    reader = ConfigReader(config)
    is_full = not reader.has("sliding_window") and ("sliding_window" in config or default is None)
    window = None if is_full else reader.count("sliding_window", MAX_POSITIONS, default)
    return (window,) * num_blocks


def read_typed_windows(
    config: Mapping[str, object], default_window: int, default_types: Sequence[str]
) -> tuple[int | None, ...]:
    """Return the window of each block where `layer_types` says which blocks have one."""
    reader = ConfigReader(config)
    layer_types = reader.texts("layer_types") if reader.has("layer_types") else default_types
    if not set(layer_types) <= {_FULL, _SLIDING}:
        raise ModelError(f"config.json: layer_types may only hold {_FULL}, {_SLIDING}")
    if "sliding_window" in config and not reader.has("sliding_window") and _SLIDING in layer_types:
        raise ModelError("config.json: sliding_window is null, but layer_types names such blocks")
    window = reader.count("sliding_window", MAX_POSITIONS, default_window)
    return tuple(window if layer_type == _SLIDING else None for layer_type in layer_types)


def every_nth_full(num_blocks: int, period: int) -> list[str]:
    """Return layer types of which the last of each `period` blocks has full attention.

    >>> every_nth_full(3, 2)
    ['sliding_attention', 'full_attention', 'sliding_attention']
    """
    return [_SLIDING if (block + 1) % period else _FULL for block in range(num_blocks)]


def full_until(num_blocks: int, first_sliding: int) -> list[str]:
    """Return layer types with full attention in the first blocks only.

    >>> full_until(3, 1)
    ['full_attention', 'sliding_attention', 'sliding_attention']
    """
    return [_SLIDING if block >= first_sliding else _FULL for block in range(num_blocks)]
