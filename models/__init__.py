"""What peers and clients both know of models: families, checkpoints and shells.

Nothing here runs blocks or opens a connection. `shoal-stories` is the bundled model. Read first:
families/family.py.
"""
