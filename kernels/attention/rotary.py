"""Rotary position embeddings: tables of cosines and sines for every scaling we can do exactly."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_LARGEST_NUMBER = 1e30
"""Far above any parameter; below, float32 has room to compute with."""

_FIRST_POSITIONS = 2048
"""Positions computed at once at the start; the table doubles from there up to its maximum."""


Rotation = tuple[Tensor, Tensor]
"""Cosines and sines (cos_TD, sin_TD) of positions."""


class RotaryTable:
    """Cosines and sines of positions `0 … max_positions - 1`, grown as positions are asked for.

    `cos_TD` and `sin_TD` are float32; D is the part of a head that is rotated, both halves
    written out. Owned by one compute thread: growing is not synchronized. They are computed on the
    CPU, the same for every device, and kept on the device of `to`.
    """

    def __init__(self, frequencies: Tensor, attention_factor: float, max_positions: int) -> None:
        self._device = frequencies.device
        self._frequencies = frequencies
        self._attention_factor = attention_factor
        self.max_positions = max_positions
        self._grow(min(_FIRST_POSITIONS, max_positions))

    @classmethod
    def build(
        cls, head_dim: int, max_positions: int, parameters: Mapping[str, object]
    ) -> RotaryTable:
        """Return the table for transformers' rope parameters (`rope_type`, `rope_theta`, …).

        `max_positions` is also the pretraining length where a scaling needs one and
        `original_max_position_embeddings` is absent. Raises ValueError for an unknown
        `rope_type`, a missing or malformed parameter, for parameters that lead to no finite table,
        and for dynamic scaling that would set in.

        >>> RotaryTable.build(8, 32, {"rope_type": "default", "rope_theta": 1e4}).cos_TD.shape
        torch.Size([32, 8])
        """
        rope_type = parameters.get("rope_type")
        scaling = _SCALINGS.get(rope_type) if isinstance(rope_type, str) else None
        if scaling is None:
            known = ", ".join(_SCALINGS)
            raise ValueError(f"unknown rope_type {rope_type!r}; known are {known}")
        if max_positions < 1:
            raise ValueError(f"a table needs at least one position, got {max_positions}")
        reader = _Parameters(head_dim, max_positions, parameters)
        try:
            frequencies, attention_factor = scaling(reader)
        except ArithmeticError as error:
            raise ValueError(f"these rope parameters cannot be computed with: {error}") from error
        if not (frequencies * max_positions).isfinite().all() or not math.isfinite(
            attention_factor
        ):
            raise ValueError("these rope parameters turn keys by angles that are not finite")
        return cls(frequencies, attention_factor, max_positions)

    def to(self, device: torch.device) -> RotaryTable:
        """Keep the table on a device from now on; return it."""
        self._device = device
        self.cos_TD, self.sin_TD = self.cos_TD.to(device), self.sin_TD.to(device)
        return self

    def rows(self, start: int, count: int) -> Rotation:
        """Return (cos_TD, sin_TD) of `count` positions from `start`: views, not to be changed.

        Raises ValueError beyond `max_positions`.
        """
        stop = start + count
        self.reserve(start, stop)
        return self.cos_TD[start:stop], self.sin_TD[start:stop]

    def reserve(self, start: int, stop: int) -> None:
        """Grow up to some positions, for `select`; raises ValueError beyond `max_positions`."""
        if not 0 <= start <= stop <= self.max_positions:
            raise ValueError(f"positions {start}:{stop} are outside 0:{self.max_positions}")
        if stop > len(self.cos_TD):
            self._grow(min(max(stop, 2 * len(self.cos_TD)), self.max_positions))

    def select(self, positions_N: Tensor) -> Rotation:
        """Return copies (cos_ND, sin_ND) of some positions; all of them were reserved.

        The positions are on the device of the table, which does not wait for them.
        """
        return self.cos_TD.index_select(0, positions_N), self.sin_TD.index_select(0, positions_N)

    def _grow(self, num_positions: int) -> None:
        # Also when a step asks for it: autograd keeps no tensors of inference mode.
        with torch.inference_mode(False):
            positions = torch.arange(num_positions, dtype=torch.float32)
            # Float32 angles as in transformers: more digits here would be different words there.
            angles_TD = torch.outer(positions, self._frequencies).repeat(1, 2)
            self.cos_TD = angles_TD.cos().mul_(self._attention_factor).to(self._device)
            self.sin_TD = angles_TD.sin().mul_(self._attention_factor).to(self._device)


def apply_rotary(states_BHTD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Return the states turned by their positions, same shape and dtype (RoFormer, 2104.09864).

    Dimension `d` is paired with `d + D/2`, as in Llama. If the tables are narrower than a head,
    the dimensions behind their width pass through. Products are float32 whatever the input.
    """
    width = cos_TD.shape[-1]
    if width < states_BHTD.shape[-1]:
        turned = apply_rotary(states_BHTD[..., :width], cos_TD, sin_TD)
        return torch.cat((turned, states_BHTD[..., width:]), dim=-1)
    first, second = states_BHTD.chunk(2, dim=-1)
    partners = torch.cat((-second, first), dim=-1)
    return torch.addcmul(states_BHTD * cos_TD, partners, sin_TD).to(states_BHTD.dtype)


@dataclass(frozen=True)
class _Parameters:
    """Typed access to a rope dictionary."""

    head_dim: int
    max_positions: int
    values: Mapping[str, object]

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key)
        if value is None:
            value = default
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 < value < _LARGEST_NUMBER
        ):
            raise ValueError(f"rope parameter {key} must be a positive number, got {value!r:.60}")
        return value

    def numbers(self, key: str, count: int) -> list[float]:
        values = self.values.get(key)
        if not isinstance(values, list) or len(values) != count:
            raise ValueError(f"rope parameter {key} must be a list of {count} numbers")
        return [_Parameters(0, 0, {key: value}).number(key) for value in values]

    def has(self, key: str) -> bool:
        return bool(self.values.get(key))

    @property
    def dim(self) -> int:
        dim = int(self.head_dim * self.number("partial_rotary_factor", 1.0))
        if dim < 2 or dim % 2 or dim > self.head_dim:
            raise ValueError(f"cannot rotate {dim} of {self.head_dim} dimensions")
        return dim

    @property
    def original_positions(self) -> float:
        return self.number("original_max_position_embeddings", self.max_positions)


def _base_frequencies(reader: _Parameters) -> Tensor:
    exponents = torch.arange(0, reader.dim, 2, dtype=torch.float32) / reader.dim
    return 1.0 / reader.number("rope_theta") ** exponents


def _scale_default(reader: _Parameters) -> tuple[Tensor, float]:
    return _base_frequencies(reader), 1.0


def _scale_linear(reader: _Parameters) -> tuple[Tensor, float]:
    return _base_frequencies(reader) / reader.number("factor"), 1.0


def _scale_dynamic(reader: _Parameters) -> tuple[Tensor, float]:
    """Dynamic NTK has an effect beyond the pretraining length only; there it cannot be cached.

    Its frequencies change with every token, while the keys in a cache were turned by older ones:
    results would depend on how the prompt was cut into steps.
    """
    if reader.max_positions > reader.original_positions:
        raise ValueError(
            f"dynamic rope scaling changes past positions beyond {reader.original_positions:.0f} "
            f"and cannot be cached; limit the session to that length, not {reader.max_positions}"
        )
    return _base_frequencies(reader), 1.0


def _scale_llama3(reader: _Parameters) -> tuple[Tensor, float]:
    """Keep what turns often within the pretraining length, slow down the rest (Llama 3.1).

    The number of turns decides: at least `high` keeps the frequency, at most `low` divides it by
    the factor, a straight blend between them.
    """
    low, high = reader.number("low_freq_factor"), reader.number("high_freq_factor")
    if not low < high:
        raise ValueError(f"rope low_freq_factor {low} must be below high_freq_factor {high}")
    frequencies = _base_frequencies(reader)
    # In this order float32 rounds as it does in transformers: far positions multiply the last bit.
    turns = reader.original_positions / (2 * math.pi / frequencies)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequencies / reader.number("factor") + kept * frequencies, 1.0


def _scale_yarn(reader: _Parameters) -> tuple[Tensor, float]:
    """Blend by the index of the pair and sharpen attention (YaRN, arXiv:2309.00071, 3.2 to 3.4)."""
    factor = reader.number("factor")
    fast = _pair_of_turns(reader, reader.number("beta_fast", 32))
    slow = _pair_of_turns(reader, reader.number("beta_slow", 1))
    if reader.values.get("truncate", True):
        fast, slow = math.floor(fast), math.ceil(slow)
    fast, slow = max(fast, 0), min(slow, reader.dim - 1)
    pairs = torch.arange(reader.dim // 2, dtype=torch.float32)
    # A range of no width would divide by zero: it becomes a step.
    scaled = ((pairs - fast) / ((slow - fast) or 0.001)).clamp(0, 1)
    frequencies = _base_frequencies(reader)
    blended = frequencies / factor * scaled + frequencies * (1 - scaled)
    return blended, _yarn_attention_factor(reader, factor)


def _pair_of_turns(reader: _Parameters, turns: float) -> float:
    """Return the (fractional) pair that turns this often within the pretraining length."""
    wavelength = reader.original_positions / turns
    return (
        reader.dim
        * math.log(wavelength / (2 * math.pi))
        / 2
        / math.log(reader.number("rope_theta"))
    )


def _scale_longrope(reader: _Parameters) -> tuple[Tensor, float]:
    """Scale each pair by a factor of its own (LongRoPE, arXiv:2402.13753).

    There is a set of short factors within the pretraining length and of long ones beyond, for all
    keys of a text: like dynamic scaling, what is beyond cannot be cached.
    """
    original = reader.original_positions
    if reader.max_positions > original:
        raise ValueError(
            f"long rope scaling changes past positions beyond {original:.0f} and cannot be cached; "
            f"limit the session to that length, not {reader.max_positions}"
        )
    factors = torch.tensor(reader.numbers("short_factor", reader.dim // 2), dtype=torch.float32)
    frequencies = _base_frequencies(reader) / factors
    factor = reader.number("factor", 1.0)
    if reader.has("attention_factor"):
        return frequencies, reader.number("attention_factor")
    sharpness = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return frequencies, sharpness


def _yarn_attention_factor(reader: _Parameters, factor: float) -> float:
    if reader.has("attention_factor"):
        return reader.number("attention_factor")
    if reader.has("mscale") and reader.has("mscale_all_dim"):
        return _sharpness(factor, reader.number("mscale")) / _sharpness(
            factor, reader.number("mscale_all_dim")
        )
    return _sharpness(factor, 1.0)


def _sharpness(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


_SCALINGS: dict[str, Callable[[_Parameters], tuple[Tensor, float]]] = {
    "default": _scale_default,
    "linear": _scale_linear,
    "dynamic": _scale_dynamic,
    "llama3": _scale_llama3,
    "yarn": _scale_yarn,
    "longrope": _scale_longrope,
}
