"""A network in memory with delays, bandwidth, loss and partitions, and a directory to match.

Tests, examples and users run whole swarms on it in one process. Nothing here opens a socket. Read
first: memory_network.py, then loopback.py.
"""
