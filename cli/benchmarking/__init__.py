"""Measured numbers: the speed of a running swarm, for `shoal bench`.

Benchmarks that start swarms of their own are not here, but in `benchmarks/`. Read first:
swarm_speed.py.
"""
