"""What `shoal monitor` and `shoal top` show: a table, a live screen, or a page over HTTP.

`client/monitor/` collects and describes the state of the swarm. Read first: page_server.py.
"""
