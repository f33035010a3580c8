"""Announcing a peer: what it says of itself, when, and the delays it measures to neighbours.

Read first: announcer.py.
"""
