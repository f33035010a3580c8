"""Reading checkpoints: safetensors files, quantized formats, and the digest of a directory.

Only tensors that are asked for are read; pickles never. Read first: checkpoint.py.
"""
