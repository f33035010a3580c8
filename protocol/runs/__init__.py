"""Training runs: what a run is, and how its members agree.

training_run.py declares and checks every field of a run file; a new one goes there, into the table
of docs/training.md, and where it is used. Nothing here computes gradients
(`peer/engine/training/`), sends messages or waits. Members may crash and be cut off from each
other. Read first: training_run.py.
"""
