"""Decoders of transformers without their blocks, for families that have no file of their own.

Read first: shell.py.
"""
