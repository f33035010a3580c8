"""Publishing adapters: pushing them to peers that hold them for all, renewing and withdrawing them.

Read first: publisher.py.
"""
