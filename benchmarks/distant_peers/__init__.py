"""Peers far apart: real processes whose connections are delayed and limited, on this machine.

`make bench BENCHMARKS=distant_peers`. Begin with `__main__.py`, which compares ways to use the
lines; `lines.py` makes them, and `swarm.py` puts peers behind them. Swarms without such lines are
measured in `swarm_benchmarks/`.
"""
