"""A peer: one process that hosts a span of blocks and computes for others.

This folder holds the composition root (peer.py) and the life of a peer: which span it serves, and
when it moves. Never imports `client`. Read first: peer.py.
"""
