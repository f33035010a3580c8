"""Training runs: what a run is, and how those who take part in it agree.

Nothing here computes gradients (`peer/engine/training/`), sends messages or waits. Members may
crash and be cut off from each other; that they lie is dealt with elsewhere. Read first:
training_run.py.
"""
