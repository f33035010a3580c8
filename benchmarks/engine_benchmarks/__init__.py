"""Engines and kernels in one process, without a network: their speed and their accuracy.

Peers and sessions are measured in `swarm_benchmarks/`. Begin with `accuracy.py`, a part of `make
bench`; the others are programs of their own: `make bench BENCHMARKS=engine_benchmarks.kernels`.
"""
