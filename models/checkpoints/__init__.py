"""Reading checkpoints: safetensors files, quantized formats, and the digest of a directory.

Only tensors that are asked for are read, and pickles never. The tensor names of a family are not
known here (`../families/`); quantizing for a peer is in `peer/engine/loading/`. Read first:
checkpoint.py.
"""
