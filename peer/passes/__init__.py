"""Fine-tuning at a peer, a workload: passes, uploaded adapters and their updates.

Nothing here belongs to sessions (`../sessions/`) or computes (`../engine/`). Read first:
training.py, then passes.py.
"""
