"""LoRA adapters of a peer: as applied to tokens, as uploaded, as trained, and those that it keeps.

Nothing here knows blocks, sessions or passes. Read first: adapter.py.
"""
