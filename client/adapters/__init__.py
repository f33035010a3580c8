"""Adapters at the client: PEFT files, versions, and what a peer is sent of them.

Read first: adapter_versions.py.
"""
