"""LoRA adapters inside a peer: as uploaded, as applied to rows, and as trained.

Read first: adapters.py.
"""
