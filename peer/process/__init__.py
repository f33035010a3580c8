"""The process that a peer is: its configuration and events, identity file, background tasks.

Nothing here knows of sessions, passes or placement. Read first: config.py.
"""
