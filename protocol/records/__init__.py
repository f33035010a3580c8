"""Signed announcements: what a peer says of itself, and the snapshot that a reader makes of them.

Records are checked here and stored nowhere; the DHT is in `net/dht`. Read first:
announcements.py.
"""
