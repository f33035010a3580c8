"""Messages as bytes: frames, and the codec, which encodes each message from its declared fields.

Only this room imports protobuf. A new message changes nothing here. Read first: codec.py.
"""
