"""Attention over cached keys and values, positions, and int8 keys and values.

Attention is there in torch (torch_), in C (native_) and in Triton (triton_). Read first:
torch_attention.py.
"""
