"""Accounts of a peer's memory: what sessions, passes and adapters may take, and what is left.

Only arithmetic and storage; admission decisions are made by the rooms that ask. Read first:
memory.py.
"""
