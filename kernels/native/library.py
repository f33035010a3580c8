"""The kernels in C: finds their library and declares its functions.

The library is optional: without a C compiler it was not built, and torch computes instead.
"""

import ctypes
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

_VERSIONS = {"int8": 3, "attention": 2, "norm": 1, "prompt_attention": 2, "gate": 2, "low_rank": 1}
"""Of the kernels in native/. A library of other versions is as good as none."""

INSTRUCTION_SETS = {2: "avx512", 1: "avx2", 0: "portable"}
"""The numbers that all of these but int8 and norm give them in native/, fastest first."""


@cache
def load_library() -> ctypes.CDLL | None:
    """Return the library, None where it was not built or belongs to other sources."""
    # A plain library and no Python module: it builds without Python's headers, and a call through
    # ctypes lets other Python threads run.
    folder = Path(__file__).parent
    for suffix in EXTENSION_SUFFIXES:
        file = folder / f"cpu{suffix}"
        if file.exists():
            library = ctypes.CDLL(str(file))
            return library if _declare(library) else None
    return None


@cache
def list_instruction_sets(kernel: str) -> dict[str, int]:
    """Return those of this processor by name, fastest first; none without the library.

    `kernel` is "attention", "prompt_attention", "gate" or "low_rank".
    """
    library = load_library()
    if library is None:
        return {}
    has = getattr(library, f"shoal_{kernel}_has")
    return {name: number for number, name in INSTRUCTION_SETS.items() if has(number)}


def _declare(library: ctypes.CDLL) -> bool:
    """Declare the arguments of the functions; return whether their versions are ours."""
    pointer, number, size = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    try:
        library.shoal_int8_pack.argtypes = [pointer, size, size, pointer]
        library.shoal_int8_transpose.argtypes = [pointer, size, size, pointer]
        library.shoal_int8_multiply.argtypes = [*[pointer] * 4, size, *[number] * 4]
        for attend in (library.shoal_attention_attend, library.shoal_prompt_attention_attend):
            attend.argtypes = [
                pointer, pointer, size, size, pointer, pointer, number, number,
            ]  # fmt: skip
        library.shoal_norm_rms.argtypes = [pointer, pointer, pointer, size, size, ctypes.c_float]
        library.shoal_gate_silu.argtypes = [*[pointer] * 3, size, size, number, number]
        library.shoal_low_rank_add.argtypes = [
            *[pointer] * 6, *[size] * 5, ctypes.c_float, *[number] * 4,
        ]  # fmt: skip
        return all(
            getattr(library, f"shoal_{kernel}_version")() == version
            for kernel, version in _VERSIONS.items()
        )
    except AttributeError:
        return False
