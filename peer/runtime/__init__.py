"""What every part of a peer runs on: its configuration, identity, background tasks and loop lag.

Read first: config.py.
"""
