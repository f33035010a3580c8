"""Swarms of real processes on this machine, beside plain transformers: the parts of `make bench`.

Begin with `__main__.py`, which lists the parts. Each is a function that takes a `Setting` and
returns figures. What needs no peers belongs to `engine_benchmarks/`, slow lines between peers to
`distant_peers/`. `drain.py` is a program of its own:
`make bench BENCHMARKS=swarm_benchmarks.drain`.
"""
