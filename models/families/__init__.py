"""One file for each family: its config.json, the names of its tensors, and the client's part.

Nothing here computes, and files of families do not import each other. A new family is one new
file and one line in registry.py (docs/new-family.md). Read first: llama.py.
"""
