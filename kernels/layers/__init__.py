"""The other parts of a decoder block: norms, gated MLPs, and expert routing.

Read first: norm.py.
"""
