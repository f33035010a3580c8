"""A whole fine-tuning run: texts, batches, schedules, checkpoints and the loop over updates.

Read first: finetune_run.py.
"""
