"""Forward and backward passes of batches through frozen blocks, without a KV cache.

Nothing here knows sessions, or when a pass may run. Read first: span_passes.py.
"""
