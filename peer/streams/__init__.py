"""Incoming streams: greeting, reading frames, and handing each message to the work that it is for.

Read first: conversation.py.
"""
