"""Training runs: what a run is, and how its members agree.

Nothing here computes gradients (`peer/engine/training/`), sends messages or waits. Members may
crash and be cut off from each other. Read first: training_run.py.
"""
