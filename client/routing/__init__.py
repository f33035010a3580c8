"""Which peers to use: the client's view of the swarm, measured costs, and the search for a route.

Pure decisions are in router.py and chain_search.py. Read first: router.py.
"""
