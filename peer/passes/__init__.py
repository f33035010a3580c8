"""Fine-tuning at a peer, a workload: passes, uploaded adapters and their updates.

Nothing of sessions is here. Read first: training.py, then passes.py.
"""
