"""Gradients through remote blocks: autograd, LoRA, prompt tuning, and saving what was trained.

Read first: autograd.py.
"""
