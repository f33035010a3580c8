"""The parts of `shoal finetune`: its options, its reports, and the plot of its losses.

Training itself is in `client/learning/`. Read first: run_report.py.
"""
