"""Where tests run programs in Triton: in its interpreter, and on a CUDA device where there is one.

One process does either. Without a device, `tests/conftest.py` chooses the interpreter; with one,
TRITON_INTERPRET=1 in the environment does.
"""

import os

import pytest
import torch

pytest.importorskip("triton")

_IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

needs_device = pytest.mark.skipif(
    _IS_INTERPRETED or not torch.cuda.is_available(),
    reason="needs a CUDA device, and TRITON_INTERPRET unset",
)

every_device = pytest.mark.parametrize(
    "device",
    [
        pytest.param(
            "cpu",
            id="interpreted",
            marks=pytest.mark.skipif(not _IS_INTERPRETED, reason="needs TRITON_INTERPRET=1"),
        ),
        pytest.param("cuda", marks=[pytest.mark.gpu, needs_device]),
    ],
)
