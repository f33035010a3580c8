"""The only I/O of the protocol: the interfaces Transport, Directory, Network and Clock.

Implementations live in the rooms below (tcp, libp2p, dht, memory, relays). A new transport is one
more of them, and is put together with the others in dht/internet.py. Here are the stream of frames
that tcp and libp2p share, and retry.py: backoff and deadlines for all sides. Nothing here knows
what peers compute. Read first: transport.py.
"""
