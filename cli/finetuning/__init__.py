"""The parts of `shoal finetune`: its options, its reports, and the plot of its losses.

The training loop is not here, but in `client/finetuning/`. Read first: run_report.py.
"""
