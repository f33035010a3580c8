"""The kernels in C: finds their library and declares its functions.

The library is optional: without a C compiler it was not built, and torch computes instead.
"""

import ctypes
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

_INT8_VERSION = 3
_ATTENTION_VERSION = 2
_NORM_VERSION = 1
_PROMPT_ATTENTION_VERSION = 2
_GATE_VERSION = 2
"""Of the functions in native/. A library of other versions is as good as none."""


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
        versions = (
            library.shoal_int8_version(),
            library.shoal_attention_version(),
            library.shoal_norm_version(),
            library.shoal_prompt_attention_version(),
            library.shoal_gate_version(),
        )
    except AttributeError:
        return False
    return versions == (
        _INT8_VERSION,
        _ATTENTION_VERSION,
        _NORM_VERSION,
        _PROMPT_ATTENTION_VERSION,
        _GATE_VERSION,
    )
