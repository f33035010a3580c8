"""How much memory passes may take at a peer, and what for."""

from dataclasses import dataclass

MOST_BYTES = 2**32
"""Beyond it more memory only helps who sends microbatches of more than 10,000 tokens."""

LEAST_BYTES = 2**27
"""With less, no pass through a model of some width finds room."""

_MOST_TENSOR_BYTES = 2**28
"""For one pass: 2,000 tokens of a model of width 8192 in float32, there and back."""


@dataclass(frozen=True)
class PassBudget:
    """The memory for all passes of a peer.

    >>> budget = PassBudget(2**32)
    >>> [size // 2**20 for size in (budget.tensor_bytes, budget.max_tensor_bytes)]
    [1024, 256]
    >>> [size // 2**20 for size in (budget.kept_bytes, budget.max_work_bytes)]
    [512, 1280]
    """

    num_bytes: int

    @property
    def tensor_bytes(self) -> int:
        """For the tensors of all passes that come in, wait, are computed or leave as answers."""
        return self.num_bytes // 4

    @property
    def max_tensor_bytes(self) -> int:
        """For the tensors of one pass, so that nobody waits alone for all others to end."""
        return min(self.tensor_bytes // 4, _MOST_TENSOR_BYTES)

    @property
    def max_gradient_bytes(self) -> int:
        """For the gradients of the adapters of one pass, which no microbatch makes smaller.

        With them one client still has no more than its share of all tensors.
        """
        return self.max_tensor_bytes

    @property
    def kept_bytes(self) -> int:
        """For what went into the blocks of passes that were answered, until somebody goes back."""
        return self.num_bytes // 8

    @property
    def work_bytes(self) -> int:
        """For what computing takes: a pass with its adapters, and its guests."""
        return self.num_bytes - self.tensor_bytes - self.kept_bytes

    @property
    def max_work_bytes(self) -> int:
        """For what computing one pass takes without adapters, so that guests find room."""
        return self.work_bytes // 2


def choose_pass_bytes(free_bytes: int) -> int:
    """Return what passes may take of so much free memory, unless a volunteer says it.

    >>> choose_pass_bytes(2**33) // 2**20
    1024
    """
    return min(free_bytes // 8, MOST_BYTES)
