"""The composition root: a client that has joined a swarm, with everything that it opens.

Nothing here talks to a peer itself. Read first: client.py.
"""
