"""The rules of a training run: who its members are, and what they have decided together.

Pure state machines: no messages are sent here, and nothing is known of tensors. Read first:
decisions.py.
"""
