"""Fine-tuning at a peer: passes, and adapters that clients upload and have updated here.

Nothing here belongs to sessions (`../sessions/`) or computes (`../engine/`). Read first: passes.py,
then pass_work.py.
"""
