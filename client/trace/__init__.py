"""Where the time of a text went: events of each step, their summary, and a file for Perfetto.

Read first: trace.py.
"""
