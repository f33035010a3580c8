"""A peer: one process that hosts a span, a range of consecutive blocks, and computes for others.

This folder holds the composition root (peer.py), the list of workloads (workloads.py) and the life
of a peer (serving_loop.py), which serves the span that `placement/` chooses, and moves. A new
workload is one more room beside `sessions/` and `passes/`, and a line in workloads.py
(docs/new-workload.md). runs/run_peer.py composes training from scratch onto a peer, whether or not
that serves a model. Nothing here imports `client`. Read first: peer.py.
"""
