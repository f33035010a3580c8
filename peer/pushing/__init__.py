"""Pushing: the outputs that a peer sends to the next hop of a chain, and its connection there.

Nothing here computes or opens sessions. Read first: session_outputs.py, then neighbours.py.
"""
