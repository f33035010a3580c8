"""Measurements of `shoal bench` and `make bench`: the speed of a swarm, and reports.

Benchmarks that start swarms of their own are not here, but in `benchmarks/`. Read first:
bench_report.py.
"""
