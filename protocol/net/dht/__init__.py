"""The directory over a Kademlia DHT, and the network between machines that is built with it.

Nothing that is read here is trusted: record_gate.py checks every record. No hidden states or
sessions pass here. Read first: internet.py, then hivemind_directory.py.
"""
