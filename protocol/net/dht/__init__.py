"""The directory of peers over a Kademlia DHT, and `internet.py`: the Network of a real machine,
made of this directory and the transports beside it.

Nothing that is read here is trusted: protocol/records checks every record. No hidden states or
sessions pass here. Read first: internet.py, then hivemind_directory.py.
"""
