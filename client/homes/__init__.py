"""Optimizers that run at peers: which peer trains which blocks, and what a lost peer causes.

The optimizer that users see is not here (`../training/peer_optimizer.py`), nor is the arithmetic of
an update (`peer/engine/adapters/`). Read first: adapter_homes.py.
"""
