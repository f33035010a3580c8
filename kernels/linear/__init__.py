"""Linear layers: weight formats, quantizing, gradients, and the int8 kernels.

The kernels exist in torch (torch_), C (native_) and Triton (triton_), and compute the same bits.
Nothing here knows a model or a checkpoint. Read first: linear.py, then quantize.py for the rules of
int8.
"""
