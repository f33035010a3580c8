"""Decoder blocks: attention, MLP and rows of a batch, on CPU and CUDA devices.

Read first: block.py.
"""
