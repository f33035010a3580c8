"""A peer: one process that hosts a span of blocks and computes for others.

This folder holds the composition root (peer.py), the kinds of work that a peer does (workloads.py)
and its life: which span it serves, and when it moves (serving_loop.py). Never imports `client`.
Read first: peer.py.
"""
