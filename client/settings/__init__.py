"""What a user may set: the client's configuration, and the names that PETALS gave to it.

Read first: config.py.
"""
