"""Whole fine-tuning runs, as `shoal finetune` does them: texts, batches, checkpoints, the loop over
updates.

The gradients of one batch are not computed here, but in `../training/`, which knows neither texts
nor runs; and nothing is printed. Read first: finetune_run.py.
"""
