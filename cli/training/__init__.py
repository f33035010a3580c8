"""The parts of `shoal train`: training a model from scratch.

The computing is in `peer/engine/training/`. Read first: train.py.
"""
