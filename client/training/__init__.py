"""Gradients through remote blocks: autograd, adapters, prompt tuning, saving what was trained.

Models are not known here, nor are loops over batches (`../learning/`) or streams to peers
(`../passes/`). Read first: autograd.py.
"""
