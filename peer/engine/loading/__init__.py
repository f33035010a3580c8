"""Loading blocks: only the tensors of a span, quantized as they arrive, cached on disk.

Nothing here computes a step, or decides which span to load. Read first: loader.py (a span), then
block_loader.py (one block).
"""
