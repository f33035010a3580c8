"""A swarm in simulated time: the real placement and routing decisions, machines made up.

Nothing here opens a socket or waits. Begin with `world.py`, the simulator. `scenarios.py`,
`traffic.py`, `steps.py` and `distances.py` put questions to it, and `__main__.py` prints the
answers: `make bench BENCHMARKS=simulation`. `pipeline.py` is about training runs, and stands alone.
"""
