"""The messages that travel between peers and clients, one module per conversation.

A message, its place in the frame, its bounds and what belongs to its conversation stand together;
bytes and frames do not (see `wire/`), and no decision does. Read first: session.py, then fields.py.
"""
