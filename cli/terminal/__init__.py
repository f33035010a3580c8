"""Output, progress lines, signals and slow imports of a command.

Nothing here knows of swarms or models. Read first: terminal.py.
"""
