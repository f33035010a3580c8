"""Training a span from scratch: weights that change, gradients of parts, sums, updates.

A new optimizer of runs is a name in `protocol/runs/training_run.py` and its cases in optimizers.py;
arithmetic that needs a library is in `kernels/`. Nothing here knows messages, other replicas, or
which part comes next. Read first: trainable_span.py.
"""
