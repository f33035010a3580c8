"""The messages that travel between peers and clients, by conversation.

Only values and their limits live here: no bytes (see `wire/`), no decisions. Read first:
session.py.
"""
