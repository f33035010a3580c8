"""The base of every part of a peer: configuration, identity file, events, background tasks.

Nothing here knows of sessions, passes or placement. Read first: config.py.
"""
