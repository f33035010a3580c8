"""Signed announcements: the record of a peer about itself, and the swarm view of a reader.

Records are checked here and stored nowhere; the DHT is in `../net/dht/`. Read first:
announcements.py.
"""
