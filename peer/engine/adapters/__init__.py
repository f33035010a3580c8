"""LoRA adapters of a peer: as applied to tokens, as uploaded, as trained, and those that it keeps.

adapter_store.py admits or refuses them and counts their memory for each client, by the rules of
`protocol/fair_share.py`. Nothing here knows blocks, sessions or passes. Read first: adapter.py.
"""
