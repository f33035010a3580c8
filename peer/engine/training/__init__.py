"""Training a span from scratch: weights that change, gradients of parts, sums, updates.

Nothing here knows messages, other replicas, or which part comes next. Read first:
trainable_span.py.
"""
