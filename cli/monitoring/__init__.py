"""The commands `shoal monitor` and `shoal top`: a table, a live screen, and the server of a page.

`client/monitor/` collects and describes the state of the swarm; the pages are in its `page/`.
Read first: page_server.py.
"""
