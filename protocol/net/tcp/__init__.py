"""Transport over TCP and TLS, with the certificate pinned that the peer announced.

Frames are cut elsewhere (`../frame_stream.py`); relays and the directory are not known. Read first:
tcp_transport.py.
"""
