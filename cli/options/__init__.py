"""Command-line options that commands share: numbers, join codes, models, adapters.

Each is read and checked here. Nothing here prints, joins a swarm or loads weights. Read first:
shared_options.py.
"""
