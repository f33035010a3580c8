"""Adapters at the client: PEFT files, versions, and the parts of them that peers receive.

Nothing here trains an adapter (`../training/`) or sends one (`../passes/`, `../publishing/`). Read
first: adapter_versions.py.
"""
