"""Linear layers: weight formats (int8, nf4 through bitsandbytes, floats), quantizing, gradients.

A new format begins in quantize.py and select.py. The int8 kernels exist in torch (torch_), C
(native_) and Triton (triton_), and compute the same bits. Nothing here knows a model or a
checkpoint. Read first: linear.py, then quantize.py for the rules of int8.
"""
