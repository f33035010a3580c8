"""Tools for concurrency: an event loop on a thread of its own, and bounded parallel work.

Read first: portal.py.
"""
