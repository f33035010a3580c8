"""Settings of a client: its configuration, and the names that PETALS gave to its fields.

Nothing here opens a file or a connection. Options of the command line are in `cli/options/`. Read
first: client_config.py.
"""
