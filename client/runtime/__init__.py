"""The composition root: a client that has joined a swarm, with everything that it opens.

Read first: client.py.
"""
