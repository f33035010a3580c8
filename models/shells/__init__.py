"""Shells: transformers' own models without weights, for families that have no file here.

A shell is built on the meta device, checked, and then given the weights of single blocks. Families
with a file in `../families/` do not pass through here. Read first: shell.py, then shell_opening.py.
"""
