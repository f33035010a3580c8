"""A session: route, hops, steps, and failover when a hop is lost.

Read first: session.py.
"""
