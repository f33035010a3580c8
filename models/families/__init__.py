"""One file for each model family: its config.json, its tensor names, and the client's part.

Nothing here computes, and files of families do not import each other. A new family is one new file
and one line in registry.py (docs/new-family.md). Read first: llama.py.
"""
