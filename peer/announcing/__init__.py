"""Announcing a peer: the content of its announcements, when they are sent, and round-trip times.

They are signed in `protocol/records/`. Nothing here serves a stream or decides on a span. Read
first: announcer.py.
"""
