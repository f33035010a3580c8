"""The language that peers, clients and tools speak: values, messages, records and their rules.

Everything here but `net/` is pure: no sockets, tasks, clock, disk or torch. A new message goes to
`messages/`, and the protocol version that it needs to versions.py. The modules of this folder are
the values that everything else is made of. Read first: spans.py.
"""
