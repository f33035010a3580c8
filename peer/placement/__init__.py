"""Which span a peer should serve: pure decisions from a swarm view.

Read first: placement.py.
"""
