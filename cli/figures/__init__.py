"""The figures of `shoal bench` and `make bench`: measuring the speed of a swarm, and the report.

Benchmarks that start swarms of their own are not here, but in `benchmarks/`. Read first:
bench_report.py.
"""
