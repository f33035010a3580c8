"""The other parts of a decoder block: norms, activations, gated MLPs, and expert routing.

Attention and linear layers are not here, nor are whole blocks (`peer/engine/blocks/`). Read first:
norm.py.
"""
