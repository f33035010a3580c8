"""Linear layers: weight formats, quantization, and the int8 kernels with their references.

Read first: linear.py.
"""
