"""Which peers to use: a record of what each announced, showed and did wrong (peer_book.py), and the
search for a route (router.py, pure). Nothing here sends hidden states; the only messages to peers
measure round trips (position.py).

Read first: peer_book.py, then router.py.
"""
