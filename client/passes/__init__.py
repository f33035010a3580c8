"""Forward and backward passes through remote blocks: microbatches, links, retries.

Autograd and optimizers are not here (`../training/`), nor is anything with a KV cache
(`../session/`). Read first: pass_asking.py.
"""
