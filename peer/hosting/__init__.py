"""The blocks that a peer holds: what fits, loading, measuring, and keeping them while it moves.

Nothing here serves a stream or chooses a span. Read first: hosted_model.py, then span_loader.py.
"""
