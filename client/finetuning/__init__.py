"""Whole fine-tuning runs, as `shoal finetune` does them: texts, batches, checkpoints, the loop over
updates.

Gradients are not computed here (`../training/`), and nothing is printed. Read first:
finetune_run.py.
"""
