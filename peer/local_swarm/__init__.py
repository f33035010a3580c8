"""Swarms on one machine: of real processes (swarm.py), or in memory in one process (loopback.py).

Read first: swarm.py.
"""
