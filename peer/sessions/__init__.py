"""Sessions at a peer, a workload: admission, steps, cached answers and prefixes.

Nothing of training is here. Read first: sessions.py.
"""
