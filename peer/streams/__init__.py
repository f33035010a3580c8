"""Incoming streams, and the interface to the workloads that serve them.

Nothing here knows a session or a pass: those are workloads, in rooms of their own. Read first:
client_stream.py, then service.py.
"""
