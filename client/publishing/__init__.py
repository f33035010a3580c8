"""Publishing finished adapters: uploading them to peers that hold them for all clients, renewing
and withdrawing them.

Adapters are trained in `../training/`. Read first: publisher.py.
"""
