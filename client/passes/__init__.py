"""Forward and backward passes through remote blocks: microbatches, links, retries.

Read first: pass_asking.py.
"""
