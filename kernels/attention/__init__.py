"""Attention over cached keys and values, positions, and int8 keys and values.

Read first: attention.py.
"""
