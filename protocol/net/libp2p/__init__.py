"""Transport over libp2p streams, for peers behind a NAT.

The daemon behind it is not here (`../p2pd/`), nor is the choice of relays (`../relays/`). Read
first: libp2p_transport.py.
"""
