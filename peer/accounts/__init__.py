"""Accounts of what strangers may take of a peer: memory for frames, passes and adapters, and dials.

Only arithmetic and storage; the rooms that ask decide. Read first: shared_bytes.py, then
adapter_shelf.py.
"""
