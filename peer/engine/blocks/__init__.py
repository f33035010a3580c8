"""Decoder blocks: attention and MLP for the tokens of a batch, on any device.

Nothing here knows the engine, its queue or how blocks are loaded. batch.py is what goes in,
hosted_block.py what every block can do. Read first: block.py.
"""
