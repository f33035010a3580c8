"""How the learning rate rises and falls over a run, as a fraction of its highest value."""

from __future__ import annotations

import math

SCHEDULES = ("cosine", "linear", "constant")


def compute_rate_fraction(
    update: int, num_updates: int, num_warmup_updates: int, schedule: str
) -> float:
    """Return the fraction for an update, counted from 0.

    It rises in a straight line, then stays, or falls to nothing after the last update.

    >>> [compute_rate_fraction(update, 6, 2, "linear") for update in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    >>> round(compute_rate_fraction(4, 6, 2, "cosine"), 9)
    0.5
    >>> compute_rate_fraction(5, 6, 0, "constant")
    1.0
    """
    if update < num_warmup_updates:
        return (update + 1) / num_warmup_updates
    if schedule == "constant":
        return 1.0
    done = (update - num_warmup_updates) / max(1, num_updates - num_warmup_updates)
    return 1.0 - done if schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
