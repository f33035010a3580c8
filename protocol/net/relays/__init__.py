"""Relays and reachability: whether others can dial a peer, and which relays it keeps if not.

Read first: reachability.py.
"""
