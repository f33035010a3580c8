"""Training at a peer: passes through frozen blocks, adapters of clients, and their optimizers.

Read first: pass_desk.py.
"""
