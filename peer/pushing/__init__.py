"""What a peer sends to the next hop of a chain, and how it reaches that hop.

Read first: outlet.py.
"""
