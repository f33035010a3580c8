"""What `shoal monitor` costs in a large swarm: `load.py` of a machine, `traffic.py` of the network,
`page.py` of a browser.

Each is a program: `make bench BENCHMARKS=monitor_benchmarks.page`. Other peers are a `Crowd` of
`measuring/`. What `--metrics` costs a peer is a part of `swarm_benchmarks`.
"""
