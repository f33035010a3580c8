"""The names of devices, for whoever has not loaded torch yet."""

import re

from ....protocol.errors import UsageError

NO_NF4 = (
    "nf4 needs a CUDA device (shoal serve --device cuda): on a CPU it would be about twenty times "
    "slower than int8; use int8"
)
"""What there is to say about weights in four bits that no device is there for."""

_NAME = re.compile(r"cpu|auto|cuda(:(?P<number>[0-9]{1,3}))?")


def parse_cuda_number(name: str) -> int | None:
    """Return which CUDA device is meant, the first by `auto`, None by `cpu`; else UsageError.

    >>> parse_cuda_number("cuda:1"), parse_cuda_number("auto"), parse_cuda_number("cpu")
    (1, 0, None)
    """
    found = _NAME.fullmatch(name)
    if found is None:
        raise UsageError(f"the device must be cpu, cuda, cuda:N or auto, not {name!r:.60}")
    return None if name == "cpu" else int(found["number"] or 0)
