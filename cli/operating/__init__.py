"""Commands by which an owner sees and controls the peers that run on this machine.

Each speaks to a peer over the Unix socket that `peer/operating/` serves. Read first:
local_peers.py.
"""
