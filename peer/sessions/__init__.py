"""Sessions at a peer, a workload: admission, steps, cached answers and prefixes.

Nothing here belongs to fine-tuning (`../passes/`) or computes (`../engine/`). Read first:
sessions.py, then held_session.py.
"""
