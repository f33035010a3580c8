"""Pushing outputs straight to the next hop of a chain, and the connections for it, including those
to peers behind a NAT.

Nothing here computes or opens sessions. Read first: session_outputs.py, then push_links.py.
"""
