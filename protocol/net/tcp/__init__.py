"""Transport over TCP and TLS, with the certificate pinned that the peer announced.

Frames are cut here but not decoded (`../../wire/`); relays and the directory are not known. Read
first: tcp_transport.py.
"""
