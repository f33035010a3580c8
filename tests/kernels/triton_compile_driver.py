"""Compiles every program in Triton for a CUDA device that need not be there; prints what came out.

Run with a compute capability, such as 80, by tests/kernels/test_triton_programs.py. With `once`
behind it, each program is compiled with one choice of its constants, and not assembled.
"""

import json
import sys
from itertools import product
from typing import Any

from triton import compile
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource

from shoal.kernels.attention import triton_attention, triton_states
from shoal.kernels.layers import triton_rows
from shoal.kernels.linear import triton_int8
from shoal.kernels.linear.quantize import MAX_COLUMNS

UNALIGNED = {
    "queries_NHD", "tables_NM", "lengths_N", "table_width", "num_parts", "window", "num_rows",
    "tables_XM", "rows_X3", "token_stride",
}  # fmt: skip
"""What the programs are not compiled anew for."""

TYPES = {
    "digits_NCI": "*i8", "values_OI": "*i8", "squares_N": "*i32", "tables_NM": "*i32",
    "lengths_N": "*i32", "scale": "fp32", "softcap": "fp32",
    "eps": "fp32", "count": "fp32",
    "norm_eps": "fp32", "pages_N": "*i32", "places_N": "*i32",
    "tables_XM": "*i32", "rows_X3": "*i32", "token_stride": "i32",
    **dict.fromkeys(["num_rows", "num_columns", "num_outputs"], "i32"),
    **dict.fromkeys(["table_width", "num_parts", "window"], "i32"),
}  # fmt: skip
"""Of arguments; the others are addresses of float32 numbers."""

PAGE_TOKENS = {"*fp32": 16, "*bf16": 32, "*i8": 64}
"""As `peer/engine/cache/paged_memory.py` lays them out."""

TILES = [tile for tiles in triton_int8.FEW_ROWS_TILES.values() for tile in tiles]
PRODUCT_TILES = [
    *((triton_int8._multiply_row, tile) for tile in triton_int8.ROW_TILES),
    *((triton_int8._multiply_rows, tile) for tile in (*TILES, triton_int8.MANY_ROWS_TILE)),
]


IS_ONCE = sys.argv[2:] == ["once"]
compiled_once: set[tuple[str, int]] = set()


def compile_program(
    program: Any,
    capability: int,
    constants: dict[str, Any],
    options: dict[str, Any],
    **types: str,
) -> None:
    name_and_digits = (program.__name__, constants.get("NUM_DIGITS", 0))
    if IS_ONCE and name_and_digits in compiled_once:
        return
    compiled_once.add(name_and_digits)
    signature = {
        name: "constexpr" if name in constants else (TYPES | types).get(name, "*fp32")
        for name in program.arg_names
    }
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, (name, kind) in enumerate(signature.items())
        if name not in UNALIGNED and (kind.startswith("*") or kind == "i32")
    }
    source = ASTSource(fn=program, signature=signature, constexprs=constants, attrs=aligned)
    compiled = compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    text = compiled.asm["ptx"]
    result = {
        "program": program.__name__,
        "constants": constants,
        "shared_bytes": compiled.metadata.shared,
        "fused": text.count("fma.rn.f32"),
        "approximate_divisions": text.count("div.full.f32") + text.count("div.approx"),
        "flushes": text.count(".ftz."),
        "on_matrix_units": text.count("mma"),
    }
    print(json.dumps(result))


def compile_int8(capability: int) -> None:
    for num_digits in (1, 2):
        constants: dict[str, Any] = {
            "LIMIT": 127.0, "SMALLEST": 2.0**-100, **triton_int8.choose_row_block(1100),
        }  # fmt: skip
        if num_digits == 2:
            constants["squares_N"] = None
        constants["NUM_DIGITS"] = num_digits
        compile_exact(triton_int8._round_row, capability, constants)
        for program, tile in PRODUCT_TILES:
            constants = {"NUM_DIGITS": num_digits, **tile.constants}
            compile_exact(program, capability, constants)


def compile_rows(capability: int) -> None:
    for num_columns in (1024, MAX_COLUMNS):
        constants = {
            "LIMIT": 32639.0, "SMALLEST": 2.0**-100, **triton_int8.choose_row_block(num_columns),
        }  # fmt: skip
        for is_layer in (False, True):
            more = {"IS_LAYER": is_layer} if is_layer else {"IS_LAYER": False, "bias_I": None}
            compile_exact(triton_rows._norm_row, capability, constants | more)
        for activation in ("silu", "gelu_tanh"):
            more = {"ACTIVATION": activation}
            compile_exact(triton_rows._gate_row, capability, constants | more)


def compile_exact(program: Any, capability: int, constants: dict[str, Any]) -> None:
    """Compile with the options of int8 products; those of the tile are among the constants."""
    options = {**triton_int8.LAUNCH_OPTIONS}
    for option in ("num_warps", "num_stages"):
        if option in constants:
            options[option] = constants[option]
    constants = {name: value for name, value in constants.items() if name not in options}
    compile_program(program, capability, constants, options)


def compile_states(capability: int) -> None:
    head_dims, kinds = (64, triton_attention.MAX_HEAD_DIM), ("*fp32", "*bf16", "*i8")
    plain = {"norm_JD": None, "cos_NR": None, "sin_NR": None, "TURNED": 0}
    for head_dim, kind, left_out in product(head_dims, kinds, ({}, plain)):
        constants: dict[str, Any] = {
            "HEADS": 8, "GROUPS": 2, "HEAD_DIM": head_dim, "TURNED": head_dim // 2,
            "PAGE_TOKENS": PAGE_TOKENS[kind], "PAGE_WIDTH": head_dim + 4, "BLOCK_D": head_dim,
        }  # fmt: skip
        constants |= left_out
        if kind != "*i8":
            constants["scales_PCGSW"] = None
        fused = "*bf16" if kind == "*bf16" else "*fp32"
        compile_program(
            triton_states._write_head, capability, constants,
            {"num_warps": 1, "enable_fp_fusion": False},
            pages_PCGSW=kind, fused_NXD=fused, queries_NHD=fused,
        )  # fmt: skip


def compile_attention(capability: int) -> None:
    for head_dim, kind in product((64, triton_attention.MAX_HEAD_DIM), ("*fp32", "*bf16", "*i8")):
        constants: dict[str, Any] = {
            "HEADS": 4, "TILES": 1, "GROUPS": 8,
            "HEAD_DIM": head_dim, "PAGE_TOKENS": PAGE_TOKENS[kind], "PAGE_WIDTH": head_dim + 8,
            "BLOCK_D": head_dim, "BLOCK_R": 16,
            "PART_TOKENS": triton_attention.PART_TOKENS,
            "BLOCK_K": triton_attention._choose_keys_at_once(head_dim),
        }  # fmt: skip
        if kind != "*i8":
            constants |= {"scales_PCGSW": None, "softcap": None}
        program = triton_attention._attend_part
        compile_program(program, capability, constants, {}, pages_PCGSW=kind)
    for head_dim, kind in ((64, "*bf16"), (64, "*i8"), (128, "*fp32"), (256, "*fp32")):
        tile = triton_attention._choose_tile(head_dim)
        options = {name: size for name, size in tile.items() if name.startswith("num_")}
        constants = {
            "HEADS": 4, "GROUPS": 8, "HEAD_DIM": head_dim, "BLOCK_D": head_dim,
            "PAGE_TOKENS": PAGE_TOKENS[kind], "PAGE_WIDTH": head_dim + 8,
            "BLOCK_T": tile["BLOCK_T"], "BLOCK_K": tile["BLOCK_K"],
        }  # fmt: skip
        if kind != "*i8":
            constants |= {"scales_PCGSW": None, "softcap": None}
        program = triton_attention._attend_tile
        compile_program(program, capability, constants, options, pages_PCGSW=kind)
    constants = {
        "HEADS": 32, "HEAD_DIM": 64, "PART_TOKENS": triton_attention.PART_TOKENS,
        "BLOCK_B": 16, "BLOCK_D": 64,
    }  # fmt: skip
    compile_program(triton_attention._join_parts, capability, constants, {})


if __name__ == "__main__":
    if IS_ONCE:
        assembler: Any = CUDABackend
        assembler.make_cubin = lambda *_: b""
    compile_int8(int(sys.argv[1]))
    compile_rows(int(sys.argv[1]))
    compile_states(int(sys.argv[1]))
    compile_attention(int(sys.argv[1]))
