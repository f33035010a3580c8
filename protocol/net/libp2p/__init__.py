"""Transport over libp2p streams, for peers behind a NAT.

Read first: libp2p_transport.py.
"""
