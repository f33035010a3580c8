"""Make the join code of the swarm in compose.yaml, once: private, with the bootstrap's address.

Usage: make_join_code.py HOST PORT. The working directory gets `peer.key`, the bootstrap's identity,
`owner/own.code`, with which the owner revokes peers, and `join/serve.code`, by which peers join.
"""

import subprocess
import sys
from pathlib import Path

from shoal.peer.process.identity_file import load_or_create_identity


def main(host: str, port: str) -> None:
    """Make what is missing."""
    peer_id = load_or_create_identity(Path("peer.key")).peer_id
    own, serve = Path("owner/own.code"), Path("join/serve.code")
    make = ["shoal", "swarm-new", "--role"]
    if not own.exists():
        subprocess.run([*make, "own", "--out", own], check=True)
    if not serve.exists():
        address = f"/dns4/{host}/tcp/{port}/p2p/{peer_id}"
        command = [*make, "serve", "--from", f"@{own}", "--out", serve, "--initial-peers", address]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
