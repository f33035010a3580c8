"""A client that has joined a swarm, with everything that it opens.

`AsyncClient` is the composition root; `Client` runs one on a thread of its own. Nothing here talks
to a peer itself. Read first: async_client.py.
"""
