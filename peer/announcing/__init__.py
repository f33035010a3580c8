"""Announcing a peer: what it says of itself, when, and the delays it measures to other peers.

Nothing here serves or decides. Read first: announcer.py.
"""
