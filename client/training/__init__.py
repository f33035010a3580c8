"""Gradients through remote blocks: autograd, adapters, prompt tuning, saving what was trained.

Models are not known here; loops over batches are in `client/learning`. Read first: autograd.py.
"""
