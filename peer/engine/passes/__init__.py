"""Forward and backward passes of batches through frozen blocks, without a KV cache.

Read first: passes.py.
"""
