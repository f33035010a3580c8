"""The only I/O of the protocol: the interfaces Transport, Directory, Network and Clock.

Implementations live in the rooms below (tcp, libp2p, dht, memory); the stream of frames that tcp
and libp2p share is here. Nothing here knows what peers compute. Read first: transport.py.
"""
