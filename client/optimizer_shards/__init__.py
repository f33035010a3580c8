"""An optimizer that runs at peers, cut into shards: which peer holds the optimizer state of which
blocks, and what is done when that peer is lost.

The optimizer that users see is not here (`../training/peer_optimizer.py`), nor is the arithmetic of
an update of an adapter (`peer/engine/adapters/`). Optimizers of training runs are in
`peer/engine/training/`. Read first: sharded_optimizer.py.
"""
