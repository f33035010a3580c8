"""Fine-tuning at a peer: forward and backward passes, uploads of adapters, optimizer steps
(updates.py), and published adapters: those held for other peers (publications.py), and those
fetched from their holders (fetches.py, holders.py).

Nothing here belongs to sessions (`../sessions/`) or computes (`../engine/`). Read first:
pass_workload.py, then wire_passes.py.
"""
