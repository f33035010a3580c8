"""LoRA adapters of a peer: as applied to tokens, as uploaded, as trained, and those that it keeps.

adapter_store.py admits them, charges clients for their memory and refuses them. Nothing here knows
blocks, sessions or passes. Read first: adapter.py.
"""
