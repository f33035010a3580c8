"""Linear layers: weight formats, quantizing, gradients, and the int8 kernels.

Those are in torch (torch_), C (native_) and Triton (triton_), and compute the same bits. Read
first: linear.py, then quantize.py for the rules of int8.
"""
