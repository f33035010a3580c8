"""Devices: where an engine computes, how it holds weights, and where KV caches lie for that.

Nothing here knows blocks or sessions. device_names.py is imported without torch. Read first:
device.py.
"""
