"""Transport over TCP and TLS, with the certificate pinned that the peer announced.

Read first: tcp_transport.py.
"""
