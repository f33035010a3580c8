"""Swarms on one machine: of real processes (swarm.py), or in memory in one process (loopback.py).

Their peers are those of `shoal serve`; nothing of a peer is made here. Read first: swarm.py.
"""

from .swarm import LocalSwarm

__all__ = ["LocalSwarm"]
