"""Turns words of a command line into checked values: numbers, join codes, models, adapters.

Nothing here prints, joins a swarm or loads weights. Read first: shared_options.py.
"""
