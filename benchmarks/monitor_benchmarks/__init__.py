"""What `shoal monitor` costs in a large swarm: `traffic.py` at the network, `page.py` in a browser.

Each is a program: `make bench BENCHMARKS=monitor_benchmarks.page`. Other peers are a `Crowd` of
`measuring/`. What `--metrics` costs a peer is a part of `swarm_benchmarks`.
"""
