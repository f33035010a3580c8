"""A whole fine-tuning run: texts, batches, checkpoints and the loop over updates.

Gradients are computed in `client/training`, and nothing is printed here. Read first:
finetune_run.py.
"""
