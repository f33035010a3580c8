"""What `shoal monitor` shows, and where: a table on the terminal, or a page over HTTP.

What is known of a swarm comes from `client/monitor/`. Read first: page_server.py.
"""
