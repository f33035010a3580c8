"""Traces of sessions: events, a recorder, their summary, a file for Perfetto.

Nothing here changes what a session does. Read first: trace.py.
"""
