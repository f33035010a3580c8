"""Makes checkpoints that come quantized, word by word as the descriptions of their formats say.

Slow and obvious, and independent of the readers. Beside each goes a plain checkpoint with the
weights that the integers stand for, in float32, which transformers can run.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of its eight numbers lies in the first four bits of a word, in the next, and so on."""


class Scheme(Protocol):
    """One format with its settings."""

    def config(self) -> dict[str, Any]:
        """Return the quantization_config of config.json."""
        ...

    def pack(self, weight_OI: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Return what is stored, by the ends of its names, and the float32 matrix [O, I]."""
        ...


def pack_words(numbers: list[int], bits: int, order: tuple[int, ...] | None = None) -> list[int]:
    """Return unsigned words, each with 32 / bits numbers; the last one is filled up with zeros."""
    per_word = 32 // bits
    words = []
    for start in range(0, len(numbers), per_word):
        inside = numbers[start : start + per_word]
        inside = inside + [0] * (per_word - len(inside))
        if order is not None:
            inside = [inside[place] for place in order]
        word = 0
        for place, number in enumerate(inside):
            assert 0 <= number < 2**bits
            word |= number << (bits * place)
        words.append(word)
    return words


def to_int32(words: list[list[int]]) -> Tensor:
    """Return rows of unsigned 32-bit words as the tensor that stores them."""
    return torch.tensor([[w - 2**32 if w >= 2**31 else w for w in row] for row in words]).int()


def pack_rows(matrix: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Pack numbers that follow each other in a row."""
    return to_int32([pack_words(row, bits, order) for row in matrix.tolist()])


def pack_columns(matrix: Tensor, bits: int) -> Tensor:
    """Pack numbers that follow each other in a column."""
    return pack_rows(matrix.t(), bits).t().contiguous()


def round_by_group(
    weight_OI: Tensor, groups: list[int], bits: int, symmetric: bool, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return numbers [O, I] and zeros [O, G], scales [O, G], and the float matrix [O, I].

    Numbers and zeros go from 0 to 2**bits - 1.
    """
    num_groups, largest = max(groups) + 1, 2**bits - 1
    numbers_OI = torch.zeros_like(weight_OI)
    dense_OI = torch.zeros_like(weight_OI)
    zeros_OG = torch.zeros(len(weight_OI), num_groups)
    scales_OG = torch.zeros(len(weight_OI), num_groups)
    for group in range(num_groups):
        inputs = [i for i, other in enumerate(groups) if other == group]
        part = weight_OI[:, inputs]
        low = part.amin(1).clamp(max=0)
        high = part.amax(1).clamp(min=0)
        if symmetric:
            high = torch.maximum(high, -low)
            low = -high
        scale = ((high - low) / largest).to(scale_dtype).float()
        zero = (-low / scale).round().clamp(0, largest)
        if symmetric:
            zero = torch.full_like(zero, 2 ** (bits - 1))
        numbers = ((part / scale[:, None]).round() + zero[:, None]).clamp(0, largest)
        numbers_OI[:, inputs] = numbers
        dense_OI[:, inputs] = (numbers - zero[:, None]) * scale[:, None]
        zeros_OG[:, group] = zero
        scales_OG[:, group] = scale
    return numbers_OI.int(), zeros_OG.int(), scales_OG.to(scale_dtype), dense_OI


def count_off(num_inputs: int, group_size: int) -> list[int]:
    """Return the group of each input if they follow each other."""
    return [i // (group_size if group_size > 0 else num_inputs) for i in range(num_inputs)]


@dataclass(frozen=True)
class Gptq:
    """GPTQ, in the first version of its format or the second."""

    bits: int = 4
    group_size: int = 16
    symmetric: bool = False
    desc_act: bool = False
    has_g_idx: bool = True
    version: int = 1

    def config(self) -> dict[str, Any]:
        return {
            "quant_method": "gptq", "bits": self.bits, "group_size": self.group_size,
            "sym": self.symmetric, "desc_act": self.desc_act, "true_sequential": True,
            "checkpoint_format": "gptq" if self.version == 1 else "gptq_v2",
        }  # fmt: skip

    def pack(self, weight_OI: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        groups = count_off(weight_OI.shape[1], self.group_size)
        if self.desc_act:
            generator = torch.Generator().manual_seed(weight_OI.shape[1])
            order = torch.randperm(len(groups), generator=generator).tolist()
            groups = [groups[place] for place in order]
        # Some outputs without negative weights, whose zero is number 0.
        weight_OI = torch.cat([weight_OI[:3].abs(), weight_OI[3:]])
        numbers_OI, zeros_OG, scales_OG, dense_OI = round_by_group(
            weight_OI, groups, self.bits, self.symmetric, torch.float16
        )
        zero_words = [pack_words(row, self.bits) for row in zeros_OG.t().tolist()]
        if self.version == 1:
            one_each = pack_words([1] * (32 // self.bits), self.bits)[0]
            zero_words = [[(word - one_each) % 2**32 for word in row] for row in zero_words]
        stored = {
            "qweight": pack_columns(numbers_OI.t(), self.bits),
            "qzeros": to_int32(zero_words),
            "scales": scales_OG.t().contiguous(),
        }
        if self.has_g_idx:
            stored["g_idx"] = torch.tensor(groups).int()
        return stored, dense_OI


@dataclass(frozen=True)
class Awq:
    """AWQ, packed for its gemm kernel."""

    group_size: int = 16

    def config(self) -> dict[str, Any]:
        return {
            "quant_method": "awq", "bits": 4, "group_size": self.group_size,
            "zero_point": True, "version": "gemm", "modules_to_not_convert": None,
        }  # fmt: skip

    def pack(self, weight_OI: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        groups = count_off(weight_OI.shape[1], self.group_size)
        numbers_OI, zeros_OG, scales_OG, dense_OI = round_by_group(
            weight_OI, groups, 4, False, torch.float16
        )
        stored = {
            "qweight": pack_rows(numbers_OI.t(), 4, AWQ_ORDER),
            "qzeros": pack_rows(zeros_OG.t(), 4, AWQ_ORDER),
            "scales": scales_OG.t().contiguous(),
        }
        return stored, dense_OI


@dataclass(frozen=True)
class Compressed:
    """compressed-tensors with integers; `group_size` counts for the strategy "group"."""

    layout: str = "int-quantized"
    bits: int = 8
    strategy: str = "channel"
    group_size: int = 16
    symmetric: bool = True
    has_g_idx: bool = False
    activations: dict[str, Any] | None = field(default=None)

    def config(self) -> dict[str, Any]:
        weights = {
            "num_bits": self.bits, "type": "int", "symmetric": self.symmetric, "dynamic": False,
            "strategy": self.strategy, "observer": "minmax",
            "group_size": self.group_size if self.strategy == "group" else None,
            "actorder": "group" if self.has_g_idx else None,
        }  # fmt: skip
        group = {
            "targets": ["Linear"], "weights": weights,
            "input_activations": self.activations, "output_activations": None,
        }  # fmt: skip
        return {
            "quant_method": "compressed-tensors", "format": self.layout, "ignore": ["lm_head"],
            "config_groups": {"group_0": group}, "quantization_status": "compressed",
            "kv_cache_scheme": None, "sparsity_config": {}, "transform_config": {},
        }  # fmt: skip

    def pack(self, weight_OI: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        num_outputs, num_inputs = weight_OI.shape
        groups = count_off(num_inputs, self.group_size if self.strategy == "group" else -1)
        if self.has_g_idx:
            groups = [i % (max(groups) + 1) for i in range(num_inputs)]
        given = weight_OI
        if self.strategy == "tensor":
            given = weight_OI.reshape(1, -1)
            groups = [0] * given.shape[1]
        numbers, zeros, scales, dense = round_by_group(
            given, groups, self.bits, self.symmetric, torch.bfloat16
        )
        numbers, dense = numbers.view_as(weight_OI), dense.view_as(weight_OI)
        half = 2 ** (self.bits - 1)
        stored = {"weight_scale": scales.flatten() if self.strategy == "tensor" else scales}
        if self.layout == "pack-quantized":
            stored["weight_packed"] = pack_rows(numbers, self.bits)
            stored["weight_shape"] = torch.tensor([num_outputs, num_inputs])
            if not self.symmetric:
                stored["weight_zero_point"] = pack_columns(zeros, self.bits)
        else:
            stored["weight"] = (numbers - half).to(torch.int8)
            if not self.symmetric:
                stored["weight_zero_point"] = (zeros - half).to(torch.int8)
        if self.has_g_idx:
            stored["weight_g_idx"] = torch.tensor(groups).int()
        return stored, dense


@dataclass(frozen=True)
class QuantizedModel:
    """A quantized checkpoint, and the plain one that it stands for."""

    directory: Path
    dense_directory: Path


def is_quantized_in(name: str, tensor: Tensor) -> bool:
    """Return whether tools quantize this tensor: a linear of a block that is no router."""
    is_in_block = ".layers." in name or ".h." in name
    is_router = name.endswith(("block_sparse_moe.gate.weight", "mlp.gate.weight"))
    return is_in_block and tensor.dim() == 2 and not is_router


def save_quantized(source: Path, target: Path, scheme: Scheme) -> QuantizedModel:
    """Quantize the checkpoint in `source` into two new directories below `target`."""
    quantized, dense = {}, {}
    is_transposed = "gpt2" in (source / "config.json").read_text()
    for name, tensor in load_file(source / "model.safetensors").items():
        quantized[name] = dense[name] = tensor
        if is_quantized_in(name, tensor):
            stored, dense_OI = scheme.pack(tensor.t() if is_transposed else tensor)
            dense[name] = (dense_OI.t() if is_transposed else dense_OI).contiguous()
            del quantized[name]
            stem = name.removesuffix("weight")
            quantized.update({stem + end: part.contiguous() for end, part in stored.items()})
    for part, tensors in (("quantized", quantized), ("dense", dense)):
        shutil.copytree(source, target / part)
        save_file(tensors, target / part / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = scheme.config()
    (target / "quantized" / "config.json").write_text(json.dumps(config))
    return QuantizedModel(target / "quantized", target / "dense")
