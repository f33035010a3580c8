"""Forward and backward passes at one hop: microbatches, links to peers, failover to other peers.

The way over all hops is `../training/remote_passes.py`. Autograd and optimizers are not here (`../training/`), nor is anything with a KV cache
(`../session/`). Read first: pass_asking.py.
"""
