"""Linear layers: weight formats (int8, nf4 through bitsandbytes, floats), quantizing, gradients.

A new format is declared in quantize.py, chosen in select.py, and has a file for each kernel: those
of int8 exist in torch (torch_), C (native_) and Triton (triton_), and compute the same bits.
Nothing here knows a model or a checkpoint. Read first: linear.py, then quantize.py for the rules of
int8.
"""
