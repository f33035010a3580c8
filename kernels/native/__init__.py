"""The kernels in C, and the library that loads them.

Sources are compiled at installation; without a compiler torch computes instead. Python that
prepares the arguments of one kernel is not here, but beside its torch version. Read first:
library.py.
"""
