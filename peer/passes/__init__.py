"""Fine-tuning at a peer: forward and backward passes, uploads of adapters, optimizer steps
(updates.py), and adapters that are published to all clients.

Nothing here belongs to sessions (`../sessions/`) or computes (`../engine/`). Read first:
pass_workload.py, then wire_passes.py.
"""
