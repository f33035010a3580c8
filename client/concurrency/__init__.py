"""Tools for concurrency: an event loop on a thread of its own, tasks with an owner.

Nothing here knows peers, sessions or models. Read first: portal.py.
"""
