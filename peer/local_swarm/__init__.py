"""Swarms on one machine: of processes (swarm.py), or in memory in one process (loopback.py).

Their peers are those of `shoal serve`: no second kind of peer may be put together here. Read first:
swarm.py.
"""

from .swarm import LocalSwarm

__all__ = ["LocalSwarm"]
