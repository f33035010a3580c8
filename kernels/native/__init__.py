"""The kernels in C, and the library that loads them.

Sources are compiled at installation; without a compiler torch computes instead. Read first:
library.py.
"""
