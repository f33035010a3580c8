"""What a peer sends to the next hop of a chain, and how it reaches that hop.

Nothing here computes or opens sessions. Read first: session_outputs.py, then neighbours.py.
"""
