"""Messages as bytes: frames, their protobuf part, and the codec that messages' fields lead to.

Only this room imports protobuf. It knows no message by its fields. Read first: codec.py.
"""
