"""Publishing an adapter to the peers of a swarm, and withdrawing it.

Read first: publisher.py.
"""
