"""Settings of a client: its configuration, and how it follows from arguments of from_pretrained().

Nothing here opens a file or a connection. Options of the command line are in `cli/options/`. Read
first: client_config.py.
"""
