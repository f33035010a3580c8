"""The messages between peers and clients, one module for each conversation.

A message is one class, with its fields, their location in the frame and its checks; a new one goes
here (docs/new-message.md). Bytes and frames are not here (`../wire/`), nor are decisions. Read
first: session.py, then fields.py.
"""
