"""Directory over a Kademlia DHT: storing, finding and exchanging announcements.

Nothing that is read here is trusted; record_gate.py checks every record. Read first:
hivemind_directory.py.
"""
