"""What `shoal monitor` and `shoal top` show: a table, a live screen, or a page over HTTP.

What is known of a swarm comes from `client/monitor/`. Read first: page_server.py.
"""
