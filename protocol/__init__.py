"""The language peers speak: values and decisions only.

A module here holds no socket, task, clock or tensor library; what needs one lives in `net/`.
"""
