"""Corpora: files of token ids that models are trained on, and the rows of a part.

Nothing here tokenizes. Read first: token_shards.py.
"""
