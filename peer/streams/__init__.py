"""Incoming streams, and the seam to the kinds of work that a peer does on them.

Nothing here knows a session or a pass: those are workloads, in rooms of their own. Read first:
workload.py, then conversation.py.
"""
