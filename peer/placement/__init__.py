"""Which span a peer should serve: pure decisions on a swarm view, and the placer that acts on them.

Nothing here loads blocks or serves a stream. Read first: placement.py, then placer.py, which asks
the directory and announces the decision.
"""
