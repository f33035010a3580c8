"""Shells, the fallback for families without a file in `../families/`: transformers' own models,
opened without weights.

A shell is built on the meta device, checked, and then given the weights of single blocks. Read
first: shell.py, then shell_opening.py.
"""
