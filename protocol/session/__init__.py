"""The rules of a session: no step is executed twice, and logs from which a lost hop is replayed.

Pure state machines, the same for client and peer; no messages are sent here. Read first:
session_state.py.
"""
