"""Decoder blocks: attention and MLP for the tokens of a batch, on any device.

Nothing here knows the engine, its queue or how blocks are loaded. Read first: block.py, then
batch.py: what goes into a block, and what every block can do.
"""
