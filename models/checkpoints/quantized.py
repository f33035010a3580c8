"""Checkpoints that come quantized: GPTQ, AWQ and compressed-tensors (llm-compressor).

Reads one linear at a time; a ModelError names the setting or tensor that cannot be read.
`read_quantization` chooses the format by config.json.

Tensor suffixes: I inputs, O outputs, G groups of inputs.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor

from ...kernels.linear.quantize import INT8_MAX, Int8Weight
from ...protocol.errors import ModelError
from .checkpoint import Tensors

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)

_WORD_BITS = 32
_INPUTS_AT_ONCE = 1024
"""Bounds what is in memory beside a weight while it becomes float."""


class QuantizedLinears(ABC):
    """How a checkpoint stores the weights of linears; other tensors are stored as usual.

    `stem` is the usual name of a weight without its last word, "weight".
    """

    @abstractmethod
    def stores(self, tensors: Tensors, stem: str) -> bool:
        """Return whether this linear is stored quantized."""

    @abstractmethod
    def load(self, tensors: Tensors, stem: str, shape: tuple[int, int]) -> Tensor | Int8Weight:
        """Return the matrix [out, in] of this shape, in memory of its own.

        In int8 if that is what is stored, else in float32. Raises ModelError when a part is
        missing or is not what the configuration makes it.
        """


class _QuantizationSettings:
    """Checked access to the `quantization_config` of a `config.json`, or an object in it."""

    def __init__(self, values: Mapping[str, object], method: str) -> None:
        self._values = values
        self._method = method

    def get(self, *names: str, default: object = None) -> object:
        """Return the first of these values that is there and not null."""
        found = (self._values[name] for name in names if self._values.get(name) is not None)
        return next(found, default)

    def choose(self, *names: str, among: Collection[object], default: object = None) -> object:
        """Return a value that must be one of a few; it may have several names."""
        value = self.get(*names, default=default)
        # True would pass for 1, and an unhashable value for an error.
        if not any(value == allowed and type(value) is type(allowed) for allowed in among):
            known = ", ".join(map(str, among))
            raise ModelError(
                f"config.json: {self._method} with {names[0]} {value!r:.60} is not supported, only "
                f"{known}; use another checkpoint of this model"
            )
        return value

    def read_group_size(self) -> int | None:
        """Return how many inputs share a scale, None for all of them."""
        value = self.get("group_size", default=-1)
        if not isinstance(value, int) or isinstance(value, bool) or value == 0 or value < -1:
            raise ModelError(
                f"config.json: {self._method} with group_size {value!r:.60} is not possible; "
                "download the model again"
            )
        return None if value == -1 else value

    def read_object(self, name: str) -> "_QuantizationSettings":
        """Return a JSON object in these settings, empty if there is none."""
        return _QuantizationSettings(_as_mapping(self.get(name, default={}), name), self._method)


def _as_mapping(value: object, name: str) -> Mapping[str, object]:
    """Return a JSON object, or raise ModelError."""
    if not isinstance(value, Mapping):
        raise ModelError(f"config.json: {name} must be an object, got {value!r:.60}")
    return cast(Mapping[str, object], value)


def _load_part(
    tensors: Tensors, name: str, shape: tuple[int, ...], dtypes: Collection[torch.dtype]
) -> Tensor:
    """Return a tensor that must have this shape and one of these dtypes, and be finite."""
    tensor = tensors.load(name)
    if tuple(tensor.shape) != shape:
        raise ModelError(
            f"tensor {name} has shape {tuple(tensor.shape)}, config.json makes it {shape}"
        )
    if tensor.dtype not in dtypes:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ModelError(f"tensor {name} is stored as {tensor.dtype} in place of {expected}")
    if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
        raise ModelError(f"tensor {name} holds NaN or infinity")
    return tensor


def _load_groups(tensors: Tensors, name: str, num_inputs: int, group_size: int) -> Tensor:
    """Return the group of each input: they follow each other unless the checkpoint names them."""
    if not tensors.has(name):
        return torch.arange(num_inputs) // group_size
    groups_I = _load_part(tensors, name, (num_inputs,), (torch.int32, torch.int64)).long()
    num_groups = -(-num_inputs // group_size)
    if bool(((groups_I < 0) | (groups_I >= num_groups)).any()):
        raise ModelError(f"tensor {name} names groups beyond the {num_groups} that there are")
    return groups_I


def _load_packed(
    tensors: Tensors,
    name: str,
    shape: tuple[int, int],
    bits: int,
    dim: int,
    order: Sequence[int] | None = None,
    increment: int = 0,
) -> Tensor:
    """Return integers of this shape from 32-bit words along a dimension; see `_unpack`.

    `increment` is added to each word before.
    """
    num_words = -(-shape[dim] * bits // _WORD_BITS)
    stored = (num_words, shape[1]) if dim == 0 else (shape[0], num_words)
    words = _load_part(tensors, name, stored, (torch.int32,)) + increment
    return _unpack(words, bits, dim, order).narrow(dim, 0, shape[dim])


def _unpack(words: Tensor, bits: int, dim: int, order: Sequence[int] | None = None) -> Tensor:
    """Return the small unsigned integers that lie in 32-bit words along a dimension, as uint8.

    The first is in the lowest bits; with `order`, the one in the lowest bits is number `order[0]`
    of its word, and so on.

    >>> _unpack(torch.tensor([0x04030201, 5]), bits=8, dim=0).tolist()
    [1, 2, 3, 4, 5, 0, 0, 0]
    """
    places = range(_WORD_BITS // bits)
    mask = (1 << bits) - 1
    parts = [(words >> (bits * place)).bitwise_and_(mask).to(torch.uint8) for place in places]
    if order is not None:
        parts = [parts[order.index(number)] for number in places]
    return torch.stack(parts, dim=dim + 1).flatten(dim, dim + 1)


@dataclass(frozen=True)
class _GroupedWeight:
    """A weight whose inputs are divided into groups: `(value - zero) * scale`.

    Each group has a zero and a scale for each output. Values and zeros are integers of at most
    8 bits, and `group_of_I` says which group an input belongs to.
    """

    values_IO: Tensor
    zeros_GO: Tensor
    scales_GO: Tensor
    group_of_I: Tensor

    def to_weight(self) -> Tensor | Int8Weight:
        """Return the matrix [out, in]: in int8 if that is the same to the bit, else in float32."""
        if len(self.scales_GO) == 1 and bool((self.scales_GO > 0).all()):
            values_IO = self.values_IO.to(torch.int16) - self.zeros_GO.to(torch.int16)
            if int(values_IO.amin()) >= -INT8_MAX - 1 and int(values_IO.amax()) <= INT8_MAX:
                values_OI = values_IO.t().to(torch.int8, memory_format=torch.contiguous_format)
                return Int8Weight(values_OI, self.scales_GO[0].to(torch.float32, copy=True))
        return self._dequantize()

    def _dequantize(self) -> Tensor:
        weight_IO = self.values_IO.to(torch.float32)
        zeros_GO, scales_GO = self.zeros_GO.float(), self.scales_GO.float()
        parts = zip(
            weight_IO.split(_INPUTS_AT_ONCE), self.group_of_I.split(_INPUTS_AT_ONCE), strict=True
        )
        for part_IO, group_of_I in parts:
            part_IO.sub_(zeros_GO[group_of_I]).mul_(scales_GO[group_of_I])
        return weight_IO.t()


_GPTQ_ONES = {4: 0x11111111, 8: 0x01010101}
"""A one for each number in a word."""


class _GptqLinears(QuantizedLinears):
    """Linears of a GPTQ checkpoint: 4 or 8 bits, groups of inputs in any order.

        qweight  int32 [I / per word, O]   inputs of one output lie together, the first lowest
        qzeros   int32 [G, O / per word]   outputs of one group lie together, the first lowest
        scales   float [G, O]
        g_idx    int32 [I]                 the group of each input; without it, in order

    In the first version of the format, every word of `qzeros` was stored less one for each number
    in it. The subtraction may have borrowed from one number for another, so the addition carries.
    """

    def __init__(self, config: Mapping[str, object]) -> None:
        settings = _QuantizationSettings(config, "GPTQ")
        self._bits = cast(int, settings.choose("bits", among=(4, 8)))
        self._group_size = settings.read_group_size()
        known = ("gptq", "gptq_v2")
        version = settings.choose("checkpoint_format", "format", among=known, default="gptq")
        self._is_first_version = version == "gptq"
        settings.choose("pack_dtype", among=("int32",), default="int32")
        exceptions = _as_mapping(settings.get("dynamic", default={}), "dynamic")
        # Names with "-:" are of linears that were left alone; those are stored as usual.
        if not all(name.startswith("-:") for name in exceptions):
            raise ModelError(
                "config.json: GPTQ with other settings for some linears (dynamic) is not "
                "supported; use another checkpoint of this model"
            )

    def stores(self, tensors: Tensors, stem: str) -> bool:
        """Return whether this linear is stored quantized."""
        return tensors.has(f"{stem}qweight")

    def load(self, tensors: Tensors, stem: str, shape: tuple[int, int]) -> Tensor | Int8Weight:
        """Return the matrix [out, in]."""
        num_outputs, num_inputs = shape
        group_size, bits = self._group_size or num_inputs, self._bits
        groups = (-(-num_inputs // group_size), num_outputs)
        ones = _GPTQ_ONES[bits] if self._is_first_version else 0
        return _GroupedWeight(
            _load_packed(tensors, f"{stem}qweight", (num_inputs, num_outputs), bits, dim=0),
            _load_packed(tensors, f"{stem}qzeros", groups, bits, dim=1, increment=ones),
            _load_part(tensors, f"{stem}scales", groups, _FLOATS),
            _load_groups(tensors, f"{stem}g_idx", num_inputs, group_size),
        ).to_weight()


_AWQ_BITS = 4
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class _AwqLinears(QuantizedLinears):
    """Linears of an AWQ checkpoint in the order of its gemm kernel: 4 bits.

        qweight  int32 [I, O / 8]
        qzeros   int32 [G, O / 8]
        scales   float [G, O]

    In each word, the lowest bits hold output 0, then 2, 4, 6, 1, 3, 5 and 7: those of one input
    are packed together.
    """

    def __init__(self, config: Mapping[str, object]) -> None:
        settings = _QuantizationSettings(config, "AWQ")
        settings.choose("bits", "w_bit", among=(_AWQ_BITS,))
        settings.choose(
            "version", "format", "checkpoint_format", among=("gemm", "GEMM"), default="gemm"
        )
        settings.choose("zero_point", among=(True,), default=True)
        self._group_size = settings.read_group_size()

    def stores(self, tensors: Tensors, stem: str) -> bool:
        """Return whether this linear is stored quantized."""
        return tensors.has(f"{stem}qweight")

    def load(self, tensors: Tensors, stem: str, shape: tuple[int, int]) -> Tensor | Int8Weight:
        """Return the matrix [out, in]."""
        num_outputs, num_inputs = shape
        group_size = self._group_size or num_inputs
        groups = (-(-num_inputs // group_size), num_outputs)
        load = partial(_load_packed, tensors, bits=_AWQ_BITS, dim=1, order=_AWQ_ORDER)
        return _GroupedWeight(
            load(f"{stem}qweight", (num_inputs, num_outputs)),
            load(f"{stem}qzeros", groups),
            _load_part(tensors, f"{stem}scales", groups, _FLOATS),
            torch.arange(num_inputs) // group_size,
        ).to_weight()


_PACKED = "pack-quantized"
_PLAIN = ("int-quantized", "naive-quantized")
_STRATEGIES = ("tensor", "channel", "group")


class _CompressedLinears(QuantizedLinears):
    """Linears of a compressed-tensors checkpoint with integer weights.

        int-quantized, naive-quantized
            weight             int8 [O, I]
        pack-quantized
            weight_packed      int32 [O, I / per word]   plus half the range, the first lowest
            weight_shape       int [2]
        both
            weight_scale       float [O, G], or [1] for the whole weight
            weight_zero_point  int8 like the scales; in pack-quantized int32 [O / per word, G]
            weight_g_idx       int32 [I]                 the group of each input, if they are mixed

    Settings for rounding activations are ignored: the int8 kernels round each row anyway.
    """

    def __init__(self, config: Mapping[str, object]) -> None:
        settings = _QuantizationSettings(config, "compressed-tensors")
        layout = settings.choose("format", among=(*_PLAIN, _PACKED))
        sparsity = settings.read_object("sparsity_config")
        sparsity.choose("format", among=("dense",), default="dense")
        if settings.get("transform_config"):
            raise ModelError(
                "config.json: compressed-tensors with a transform_config is not supported; use "
                "another checkpoint of this model"
            )
        weights = _find_weights(settings)
        weights.choose("type", among=("int",), default="int")
        self._is_packed = layout == _PACKED
        self._bits = cast(
            int, weights.choose("num_bits", among=(4, 8) if self._is_packed else (8,))
        )
        self._strategy = weights.choose("strategy", among=_STRATEGIES)
        self._is_symmetric = weights.choose("symmetric", among=(True, False), default=True)
        self._group_size = weights.read_group_size()
        if self._strategy == "group" and self._group_size is None:
            raise ModelError("config.json: compressed-tensors with groups has no group_size")

    def stores(self, tensors: Tensors, stem: str) -> bool:
        """Return whether this linear is stored quantized."""
        return tensors.has(f"{stem}weight_packed" if self._is_packed else f"{stem}weight_scale")

    def load(self, tensors: Tensors, stem: str, shape: tuple[int, int]) -> Tensor | Int8Weight:
        """Return the matrix [out, in]."""
        num_outputs, num_inputs = shape
        group_size = num_inputs
        if self._strategy == "group" and self._group_size is not None:
            group_size = self._group_size
        num_groups = -(-num_inputs // group_size)
        # One scale for the whole weight counts as the same scale for each output.
        stored = (1,) if self._strategy == "tensor" else (num_outputs, num_groups)
        scales = _load_part(tensors, f"{stem}weight_scale", stored, _FLOATS)
        values_OI, zeros = self._load_integers(tensors, stem, shape, stored)
        return _GroupedWeight(
            values_OI.t(),
            zeros.expand(num_outputs, num_groups).t(),
            scales.expand(num_outputs, num_groups).t(),
            _load_groups(tensors, f"{stem}weight_g_idx", num_inputs, group_size),
        ).to_weight()

    def _load_integers(
        self, tensors: Tensors, stem: str, shape: tuple[int, int], scales: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """Return values [O, I] and zeros in the shape of the scales."""
        bits, zero_name = self._bits, f"{stem}weight_zero_point"
        if not self._is_packed:
            zeros = torch.zeros(scales, dtype=torch.int8)
            if not self._is_symmetric:
                zeros = _load_part(tensors, zero_name, scales, (torch.int8,))
            return _load_part(tensors, f"{stem}weight", shape, (torch.int8,)), zeros

        stored = _load_part(tensors, f"{stem}weight_shape", (2,), (torch.int32, torch.int64))
        if tuple(stored.tolist()) != shape:
            raise ModelError(
                f"tensor {stem}weight_packed stands for shape {tuple(stored.tolist())}, "
                f"config.json makes it {shape}"
            )
        values = _load_packed(tensors, f"{stem}weight_packed", shape, bits, dim=1)
        if self._is_symmetric:
            return values, torch.full(scales, 1 << (bits - 1), dtype=torch.uint8)
        if self._strategy == "tensor":
            raise ModelError(
                f"tensor {zero_name}: one packed zero for a whole weight is not supported"
            )
        return values, _load_packed(tensors, zero_name, (shape[0], scales[1]), bits, dim=0)


def _find_weights(settings: _QuantizationSettings) -> _QuantizationSettings:
    """Return the settings of the quantized weights, which must be the same for all linears."""
    groups = _as_mapping(settings.get("config_groups", default={}), "config_groups")
    found = [_as_mapping(group, "config_groups").get("weights") for group in groups.values()]
    if not found or any(weights != found[0] for weights in found):
        raise ModelError(
            f"config.json: compressed-tensors with {len(found)} different config_groups is not "
            "supported; use a checkpoint with one"
        )
    return _QuantizationSettings(_as_mapping(found[0], "weights"), "compressed-tensors")


_METHODS: Mapping[str, Callable[[Mapping[str, object]], QuantizedLinears]] = {
    "awq": _AwqLinears,
    "compressed-tensors": _CompressedLinears,
    "gptq": _GptqLinears,
}
"""By the `quant_method` of `quantization_config`."""

_CONFIG_NAMES = ("quantization_config", "compression_config")
"""The second is what compressed-tensors wrote before."""


def read_quantization(config: Mapping[str, object]) -> QuantizedLinears | None:
    """Return how the linears of this checkpoint are stored, None if they are plain tensors.

    Raises ModelError for what cannot be read, before any weight is.
    """
    name = next((name for name in _CONFIG_NAMES if config.get(name) is not None), None)
    if name is None:
        return None
    settings = _as_mapping(config[name], name)
    method = settings.get("quant_method")
    if not isinstance(method, str) or method not in _METHODS:
        raise ModelError(
            f"this checkpoint is quantized already, with quant_method {method!r:.60}, which is not "
            f"supported; use the original one, or one made with {', '.join(_METHODS)}"
        )
    return _METHODS[method](settings)
