"""Diagnosis of a swarm: which link is broken, and what to do.

Read first: diagnosis.py.
"""
