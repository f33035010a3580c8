"""What peers and clients both know of models: families, checkpoints and shells.

Nothing here serves blocks or opens a connection. `shoal-stories` is the bundled model. Read first:
spec_reader.py, then families/llama.py.
"""
