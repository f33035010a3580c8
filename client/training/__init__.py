"""Gradients through remote blocks, and training at a client: autograd, LoRA adapters, prompt
tuning, saving.

Models are not known here, nor are loops over batches (`../finetuning/`) or streams to peers
(`../passes/`). Read first: autograd.py.
"""
