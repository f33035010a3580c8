"""Sessions at a peer: admission, steps, cached answers and prefixes.

Read first: admission.py.
"""
