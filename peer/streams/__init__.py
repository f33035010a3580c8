"""Incoming streams, and the interface to the workloads that serve them.

Nothing here knows a session or a pass: those are workloads, in rooms of their own. Read first:
workload.py, then conversation.py.
"""
