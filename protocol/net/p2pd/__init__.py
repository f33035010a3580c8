"""The libp2p daemon: its process, its addresses, and requests to it.

Streams between peers are not here (`../libp2p/`), nor are records (`../dht/`). Read first:
p2p_daemon.py.
"""
