"""Which peers to use: what each announced, its measured speed and its failures (peer_book.py), and
the search for a route (router.py, pure), where a new policy goes; route_finder.py reads the
directory and waits for missing blocks. Nothing here sends hidden states; the only messages to peers
measure round trips (own_coordinate.py).

Read first: peer_book.py, then router.py.
"""
