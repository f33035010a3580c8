"""One file for each model family: its config.json, its tensor names, and the parts that a client
computes (embeddings, final norm, head).

Nothing here computes, and files of families do not import each other. A new family is one new file
and one line in registry.py (docs/new-family.md); `../specs/` changes only if its blocks differ in a
way that no other family's do, and then `peer/engine/blocks/` as well. Read first: llama.py.
"""
