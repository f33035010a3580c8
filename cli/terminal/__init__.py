"""What a command does to its process: its output, its progress line, signals and slow imports.

Nothing here knows of swarms or models. Read first: terminal.py.
"""
