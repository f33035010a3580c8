"""The other parts of a decoder block: norms, gated MLPs, and expert routing.

Attention and linear layers are not here, nor are whole blocks (`peer/engine/blocks/`). Read first:
norm.py.
"""
