"""Sessions at a peer: a workload that admits sessions and their forks, and takes their steps and
deep prompts.

Nothing here belongs to fine-tuning (`../passes/`) or computes (`../engine/`). Read first:
sessions.py, then held_session.py.
"""
