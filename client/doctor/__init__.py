"""Diagnosis of a swarm: which link is broken, and what to do.

It dials and asks, but changes nothing and prints nothing: `cli/commands/doctor.py` does. Read
first: diagnosis.py.
"""
