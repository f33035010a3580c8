"""The libp2p daemon: its process, its addresses, and questions that are asked through it.

Read first: p2p_daemon.py.
"""
