"""The only I/O of the protocol: the seams Transport, Directory and Clock, and what they share.

Implementations live in the rooms below (tcp, libp2p, dht, memory) and never import each other's
callers. Read first: transport.py.
"""
