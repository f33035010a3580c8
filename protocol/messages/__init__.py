"""The messages between peers and clients, one module for each conversation, and their frames.

A message is one class, with its fields, their location in the frame and its checks; a new one goes
here (docs/new-message.md). codec.py makes bytes of all of them, and alone imports protobuf; a new
message changes nothing in it. Decisions are not here; who answers is a workload in `peer/`. Read
first: session.py, then fields.py.
"""
