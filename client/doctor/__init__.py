"""Diagnosis of a swarm: which link is broken, and what to do.

It dials and asks, but changes nothing and prints nothing: see `cli/commands/doctor.py`. Read first:
diagnosis.py.
"""
