"""Tools for concurrency: an event loop on a thread of its own, tasks with an owner, a lock by key.
Nothing here knows of peers.

Read first: portal.py.
"""
