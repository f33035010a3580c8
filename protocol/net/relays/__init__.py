"""Relays and reachability: whether others can dial a peer, and which relays it keeps if not.

The streams through a relay are not here (`../libp2p/`). Read first: reachability.py.
"""
