"""Which span a peer should serve: pure decisions from a swarm view, and who acts on them.

Read first: placement.py; placer.py asks the directory and announces what was decided.
"""
