"""A whole fine-tuning run: texts, batches, checkpoints and the loop over updates.

Gradients are not computed here (`../training/`), and nothing is printed. Read first:
finetune_run.py.
"""
