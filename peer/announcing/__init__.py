"""Announcing a peer: the content of its announcements, their times, and delays to other peers.

Nothing here serves a stream or decides on a span. Read first: announcer.py.
"""
