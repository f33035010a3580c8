"""LoRA adapters of a peer: as applied to tokens, as read from an upload, and as trained.

Nothing here knows blocks, sessions or passes. Read first: adapter.py.
"""
