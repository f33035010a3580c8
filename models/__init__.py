"""Model families and checkpoints: everything about models that clients and peers both use.

A family has a file in `families/`; for all others, `shells/` uses transformers' own code. Nothing
here serves blocks or opens a connection. `shoal-stories` is the bundled model. Read first:
spec_reader.py, then families/llama.py.
"""
