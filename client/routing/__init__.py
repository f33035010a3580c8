"""Which peers to use: a book of what is known of them, and the search for a route. Nothing here
sends hidden states; the only words to peers measure round trips (position.py).

Pure decisions are in router.py and chain_search.py. Read first: router.py.
"""
