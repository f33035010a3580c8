"""A peer as a member of training runs: it holds a stage, and its mates hold the same.

What one member asks of another is answered in training_loop.py, by the stage that it holds
(stage.py) and the decisions that it knows (run_decisions.py). reduction.py sums gradients over the
members of a stage; leader.py is what the member does that leads; run_workload.py and
remote_members.py carry questions over streams; run_peer.py builds all of it. Weights and passes are
in `engine/training/`, the rules in `protocol/runs/`. Read first: stage.py.
"""
