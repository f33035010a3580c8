"""libp2p: the p2pd process, addresses, and the transport over its streams for peers behind a NAT.

Records are not here (`../dht/`), nor is the choice of relays (`../relays/`). Read first:
p2p_daemon.py, then libp2p_transport.py.
"""
