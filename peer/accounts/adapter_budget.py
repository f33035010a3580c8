"""How much memory the adapters may take that clients bring to a peer."""

MOST_BYTES = 2**29
"""Of all adapters together, as they were brought. One client may have half of that and a bit."""

LEAST_BYTES = 2**24
"""With less, there is no room for an adapter of a model of some width."""


def choose_adapter_bytes(free_bytes: int) -> int:
    """Return what adapters may take of so much free memory, unless a volunteer says it.

    Nothing where that is less than the least that one may say.

    >>> choose_adapter_bytes(2**32) // 2**20
    256
    >>> choose_adapter_bytes(2**27)
    0
    """
    num_bytes = min(free_bytes // 16, MOST_BYTES)
    return num_bytes if num_bytes >= LEAST_BYTES else 0
