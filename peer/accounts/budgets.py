"""How much memory passes and adapters may take at a peer, and what for."""

from dataclasses import dataclass

MOST_PASS_BYTES = 2**32
"""For passes. More only helps clients that send microbatches of more than 10,000 tokens."""

LEAST_PASS_BYTES = 2**27
"""With less, no pass through a model of some width finds room."""

MOST_ADAPTER_BYTES = 2**29
"""Of all adapters together, as they were brought. One client may have half of that and a bit."""

LEAST_ADAPTER_BYTES = 2**24
"""With less, there is no room for an adapter of a model of some width."""

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
    return min(free_bytes // 8, MOST_PASS_BYTES)


def choose_adapter_bytes(free_bytes: int) -> int:
    """Return what adapters may take of so much free memory, unless a volunteer says it.

    Nothing where that is less than the least that one may say.

    >>> choose_adapter_bytes(2**32) // 2**20
    256
    >>> choose_adapter_bytes(2**27)
    0
    """
    num_bytes = min(free_bytes // 16, MOST_ADAPTER_BYTES)
    return num_bytes if num_bytes >= LEAST_ADAPTER_BYTES else 0
