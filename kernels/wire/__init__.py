"""Codecs for tensors on the wire.

Read first: compress.py.
"""
