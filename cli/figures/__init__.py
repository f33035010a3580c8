"""Measurements of `shoal bench` and `make bench`: the speed of a swarm, and reports.

Benchmarks that start their own swarms are in `benchmarks/`. Read first: bench_report.py.
"""
