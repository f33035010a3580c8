"""The rules of a session: which step is executed, and the logs that a replay reads.

Pure state machines, the same for client and peer; no messages are sent here. Read first: table.py.
"""
