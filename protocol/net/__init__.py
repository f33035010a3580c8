"""The only I/O of the protocol: the interfaces Transport, Directory, Network and Clock.

Implementations live in the rooms below (tcp, libp2p, dht, memory, relays). A new transport, or
another source of records than the DHT, is one more of them; dht/internet.py puts them together.
Here are the stream of frames that tcp and libp2p share, and for all sides retry.py (backoff and
deadlines) and tasks.py (cancellation). Nothing here knows what peers compute. Read first:
transport.py.
"""
