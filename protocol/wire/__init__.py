"""The bytes of messages: frames, codecs, and the checks that a frame passes before it is believed.

Only this room imports protobuf. It never decides what a message causes. Read first: frames.py.
"""
