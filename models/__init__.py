"""Model families and checkpoints: everything about models that clients and peers both use.

A family has a file in `families/`; for all others, `shells/` uses transformers' own code. Nothing
here serves blocks or opens a connection. `shoal-stories` is the bundled model. `token_shards.py`
reads the corpora that models are trained on. Read first: spec_reader.py, then families/llama.py.
"""
