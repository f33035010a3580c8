"""Optimizers that run at peers: where each trained part lives, and what a lost peer causes.

Read first: adapter_homes.py.
"""
