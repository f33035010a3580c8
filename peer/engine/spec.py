"""What a model's blocks look like, in numbers that are checked before anything is computed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

import torch
import torch.nn.functional as F

from ...protocol.errors import ModelError
from ...protocol.limits import MAX_BLOCKS, MAX_HIDDEN_SIZE

MAX_HEADS = 4096
MAX_HEAD_DIM = 1024
MAX_INTERMEDIATE_SIZE = 2**20
MAX_POSITIONS = 2**24
MAX_VOCABULARY = 2**24

_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda gate: F.gelu(gate, approximate="tanh"),
    "relu": F.relu,
}
"""By the name in `config.json`."""

_SCALED_BY_ORIGINAL_LENGTH = ("llama3", "yarn")


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The shape of one model: enough to build any of its blocks.

    `sliding_windows` has one entry per block, None for full attention. `rope_parameters` follows
    transformers 5. `dtype` is the one that the weights were published in.
    """

    family: str
    hidden_size: int
    num_blocks: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    rope_parameters: Mapping[str, object]
    max_positions: int
    vocab_size: int
    tie_word_embeddings: bool
    dtype: torch.dtype
    activation: str
    sliding_windows: tuple[int | None, ...]
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    has_qk_norm: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"config.json: {self.num_heads} attention heads cannot share "
                f"{self.num_kv_heads} key-value heads evenly"
            )
        if self.head_dim % 2:
            raise ModelError(f"config.json: head_dim must be even, got {self.head_dim}")
        if self.activation not in ACTIVATIONS:
            raise ModelError(
                f"config.json: activation {self.activation!r} is not supported; "
                f"supported are {', '.join(ACTIVATIONS)}"
            )
        if len(self.sliding_windows) != self.num_blocks:
            raise ModelError(
                f"config.json: {len(self.sliding_windows)} layer types for {self.num_blocks} blocks"
            )

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together, and of all value heads."""
        return self.num_kv_heads * self.head_dim

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the block-local names of a block's tensors with the shapes they must have."""
        hidden, query, kv, inner = (
            self.hidden_size,
            self.query_size,
            self.kv_size,
            self.intermediate_size,
        )
        shapes: dict[str, tuple[int, ...]] = {
            "attention_norm": (hidden,),
            "query": (query, hidden),
            "key": (kv, hidden),
            "value": (kv, hidden),
            "output": (hidden, query),
            "mlp_norm": (hidden,),
            "gate": (inner, hidden),
            "up": (inner, hidden),
            "down": (hidden, inner),
        }
        if self.has_qkv_bias:
            shapes |= {"query_bias": (query,), "key_bias": (kv,), "value_bias": (kv,)}
        if self.has_output_bias:
            shapes |= {"output_bias": (hidden,)}
        if self.has_mlp_bias:
            shapes |= {"gate_bias": (inner,), "up_bias": (inner,), "down_bias": (hidden,)}
        if self.has_qk_norm:
            shapes |= {"query_norm": (self.head_dim,), "key_norm": (self.head_dim,)}
        return shapes


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
            raise ModelError(f"config.json: {name} must be a text, got {value!r:.60}")
        return value

    def texts(self, name: str) -> list[str]:
        """Return a list of texts."""
        value = self._config.get(name)
        if not isinstance(value, list) or not all(
            isinstance(item, str) for item in cast(list[object], value)
        ):
            raise ModelError(f"config.json: {name} must be a list of texts")
        return cast(list[str], value)

    def mapping(self, name: str) -> dict[str, object]:
        """Return a JSON object, empty if there is none."""
        value = self._config.get(name) or {}
        if not isinstance(value, dict):
            raise ModelError(f"config.json: {name} must be an object, got {value!r:.60}")
        return dict(cast(dict[str, object], value))


def read_common_fields(config: Mapping[str, object]) -> dict[str, Any]:
    """Return the fields of a ModelSpec that every family here spells in one way."""
    reader = ConfigReader(config)
    if reader.has("quantization_config"):
        raise ModelError(
            "this checkpoint is quantized already; use the original one, shoal quantizes by itself"
        )
    hidden_size = reader.count("hidden_size", MAX_HIDDEN_SIZE)
    num_heads = reader.count("num_attention_heads", MAX_HEADS)
    if not reader.has("head_dim") and hidden_size % num_heads:
        raise ModelError(
            f"config.json: hidden_size {hidden_size} is no multiple of {num_heads} heads"
        )
    return {
        "hidden_size": hidden_size,
        "num_blocks": reader.count("num_hidden_layers", MAX_BLOCKS),
        "num_heads": num_heads,
        "num_kv_heads": reader.count("num_key_value_heads", MAX_HEADS, default=num_heads),
        "head_dim": reader.count("head_dim", MAX_HEAD_DIM, max(1, hidden_size // num_heads)),
        "intermediate_size": reader.count("intermediate_size", MAX_INTERMEDIATE_SIZE),
        "norm_eps": reader.number("rms_norm_eps", default=1e-6),
        "rope_parameters": read_rope_parameters(config),
        "max_positions": reader.count("max_position_embeddings", MAX_POSITIONS),
        "vocab_size": reader.count("vocab_size", MAX_VOCABULARY),
        "tie_word_embeddings": reader.flag("tie_word_embeddings", default=False),
        "dtype": _read_dtype(reader),
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
        positions = reader.count("max_position_embeddings", MAX_POSITIONS)
        parameters.setdefault("original_max_position_embeddings", positions)
    return MappingProxyType(parameters)


def _read_dtype(reader: ConfigReader) -> torch.dtype:
    name = reader.text("dtype", default=reader.text("torch_dtype", default="float32"))
    if name not in _DTYPES:
        raise ModelError(f"config.json: dtype {name!r} is not one of {', '.join(_DTYPES)}")
    return _DTYPES[name]
