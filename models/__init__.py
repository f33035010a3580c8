"""Model families and checkpoints: everything about models that clients and peers both use.

`shells/` runs families without a file here by transformers' own code. Nothing here serves blocks or
opens a connection. `shoal-stories` is the bundled model. Read first: spec_reader.py, then
families/llama.py.
"""
