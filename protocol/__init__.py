"""The language that peers, clients and tools speak: values, messages, records and their rules.

Everything here but `net/` is pure: no sockets, tasks, clock, disk or torch. A new message is a
class in `messages/`; versions.py names the protocol version that brings it; fair_share.py divides
what a peer has, such as memory, between its clients. The other modules of this folder are the
values that everything else is made of. Read first: spans.py.
"""
