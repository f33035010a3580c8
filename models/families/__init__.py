"""Model families: one file for each, which maps a config and checkpoint names to a block's spec.

A new family is one new file and one line in registry.py. Read first: spec.py, then llama.py.
"""
