"""What an int8 product is, whoever computes it.

All kernels compute the same numbers, bit by bit:

1.  A row of activations becomes whole numbers, `round(x / step)`, of at most 127 in magnitude for
    one digit and 32639 for two (`256 * high + low`), where `step` is the row's absmax over that
    limit. Magnitudes count as 2**-100 at least; a row with NaN or infinity has the step NaN.
2.  They are multiplied with the int8 weights and summed: an integer, exact in any order.
3.  The sum is rounded to float32 once. Then it is multiplied by the row's step and by the
    output's scale, and the bias is added, each rounded as float32.

So a row's result depends on nothing but the row: not on its batch, the threads, the processor.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from .quantize import INT8_MAX, Int8Weight

DIGIT_LIMITS = {1: INT8_MAX, 2: 256 * INT8_MAX + INT8_MAX}
"""Largest magnitude of an activation by the number of its int8 digits."""

SMALLEST_ABSMAX = 2.0**-100
"""Keeps the division by a row's absmax finite for zeros and subnormal numbers."""

MAX_COLUMNS = 2**16
"""Most columns whose products of bytes surely fit into 32 bits."""

OUTPUT_MULTIPLE = 32
"""Layouts may keep so many outputs together."""


class Int8Product(Protocol):
    """One weight in a kernel's own layout, ready to multiply."""

    num_bytes: int
    """Memory held: weights, scales and bias."""
    scales_O: Tensor
    """One for each output, float32."""

    def multiply(self, hidden_NI: Tensor, num_digits: int) -> Tensor:
        """Return the product in the dtype of `hidden_NI`, a matrix of any float dtype."""
        ...

    def multiply_roughly(self, hidden_NI: Tensor) -> tuple[Tensor, Tensor]:
        """Return the product with one digit, and for each row how rough that is.

        That is the sum of the squares of the row's whole numbers, [N] int32: rounding changes
        each by 0.29 on average, so the row as a whole by 0.29 over their root mean square. An
        integer, and so the same on every processor.
        """
        ...

    def transpose(self, first_output: int, last_output: int) -> "Int8Product":
        """Return the product with the transposed whole numbers of some outputs, in new memory.

        Takes rows of `last_output - first_output` numbers to rows of `in_features`; all its
        scales are one, and it has no bias. `first_output` is a multiple of `OUTPUT_MULTIPLE`,
        and there are at most `MAX_COLUMNS` outputs.
        """
        ...


@dataclass(frozen=True)
class Int8Kernel:
    """A way to multiply with int8 weights on this machine."""

    name: str
    """What a peer announces and prints, such as "int8: avx512-vnni"."""
    pack: Callable[[Int8Weight, Tensor | None], Int8Product]
    """Copy a weight [out, in] and a bias [out] into the kernel's layout."""
