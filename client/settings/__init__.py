"""What a user may set: the client's configuration, and the names that PETALS gave to it.

Nothing here opens a file or a connection. Read first: config.py.
"""
