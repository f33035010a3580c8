"""Model families, checkpoints and shells: everything about models that both sides use.

Nothing here serves blocks or opens a connection. `shoal-stories` is the bundled model. Read first:
spec_reader.py, then families/llama.py.
"""
