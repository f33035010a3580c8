"""Sessions at a peer: a workload with admission (forks begin with a copy of their parent's cache),
steps, and the soft prompts that a session brings.

Nothing here belongs to fine-tuning (`../passes/`) or computes (`../engine/`). Read first:
sessions.py, then held_session.py.
"""
