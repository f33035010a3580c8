"""Divides the blocks of a model among the peers of a new swarm; pure arithmetic."""

from itertools import pairwise

from ...protocol.errors import UsageError
from ...protocol.spans import Span


def cut_evenly(num_blocks: int, num_parts: int) -> list[Span]:
    """Cut all blocks into consecutive spans of nearly equal length, the longer ones first.

    Raises UsageError when there are fewer blocks than parts.

    >>> [str(span) for span in cut_evenly(8, 3)]
    ['0:3', '3:6', '6:8']
    """
    if not 0 < num_parts <= num_blocks:
        raise UsageError(f"{num_blocks} blocks cannot be cut into {num_parts} spans")
    length, num_longer = divmod(num_blocks, num_parts)
    starts = [part * length + min(part, num_longer) for part in range(num_parts + 1)]
    return [Span(start, stop) for start, stop in pairwise(starts)]


def choose_num_replicas(num_peers: int) -> int:
    """Return the default number of peers that hold each block: two if there are enough peers."""
    return 2 if num_peers >= 4 else 1


def plan_spans(num_blocks: int, num_peers: int, num_replicas: int) -> list[Span]:
    """Return one span per peer, so that every block is on exactly `num_replicas` peers.

    Peers form that many rows, as equal as can be, and each row cuts all blocks evenly among its
    peers. Raises UsageError when that cannot be.

    >>> [str(span) for span in plan_spans(8, 5, 2)]
    ['0:3', '3:6', '6:8', '0:4', '4:8']
    """
    if num_peers < num_replicas:
        raise UsageError(
            f"{num_replicas} replicas of every block need at least {num_replicas} peers, "
            f"not {num_peers}"
        )
    num_per_row, num_longer = divmod(num_peers, num_replicas)
    rows = [num_per_row + (row < num_longer) for row in range(num_replicas)]
    if rows[0] > num_blocks:
        raise UsageError(
            f"the model has {num_blocks} blocks, too few for {num_peers} peers with "
            f"{num_replicas} replicas; use at most --peers {num_blocks * num_replicas} or "
            "more --replicas"
        )
    return [span for row in rows for span in cut_evenly(num_blocks, row)]
