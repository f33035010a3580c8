"""Bringing up a span: load its blocks, measure them, and build the service that answers for them.

Read first: hosting.py.
"""
