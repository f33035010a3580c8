"""What several commands share: the terminal, options, sizes and durations, and text that streams.

Read first: terminal.py.
"""
