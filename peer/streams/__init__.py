"""Incoming streams, and the interface `Workload` (service.py), whose implementations serve them.

Nothing here knows a session or a pass: those are workloads, in packages of their own. The smallest
one is here, record_workload.py: it tells announcements. Read first: client_stream.py, then
service.py.
"""
