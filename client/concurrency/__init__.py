"""Tools for concurrency: an event loop on a thread of its own, tasks with an owner, a lock by key.

Nothing here knows peers, sessions or models. Read first: portal.py.
"""
