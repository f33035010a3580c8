"""Forward and backward passes at one hop: microbatches, links to peers, failover to other peers.

The way over all hops is `../training/remote_passes.py`; autograd and optimizers are there as well.
Nothing here has a KV cache (`../session/`). Read first: pass_asking.py.
"""
