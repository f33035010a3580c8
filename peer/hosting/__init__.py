"""The blocks that a peer holds: how many fit, loading and measuring them, and keeping those that
the next span has too.

Nothing here serves a stream or chooses a span. Read first: hosted_model.py, then span_loader.py.
"""
