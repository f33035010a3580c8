"""Watch a swarm lose a peer and get another: run `make monitor-demo`, and open the page it names.

The swarm is healthy at first. After 20 seconds a peer is killed: within seconds it is lost on the
page, and four blocks have a single replica. 20 seconds later another one joins. Ctrl-C ends it.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from shoal.peer.local_swarm.swarm import LocalSwarm

MODEL = Path(__file__).resolve().parents[1] / "models" / "shoal-stories"


def main(seconds: str = "20", listen: str = "127.0.0.1:8480") -> None:
    """Run the swarm and its monitor; `seconds` lie between what happens."""
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalSwarm(MODEL, spans=[(0, 4), (0, 4), (4, 8), (4, 8)]) as swarm,
    ):
        command = ["monitor", "--listen", listen, "--history", f"{folder}/history.sqlite"]
        command += ["--initial-peers", *swarm.initial_peers]
        with subprocess.Popen([sys.executable, "-P", "-m", "shoal.cli", *command]) as monitor:
            try:
                time.sleep(float(seconds))
                print(f" Killed …{swarm.peers[3].peer_id[-8:]}, blocks 4:8.", flush=True)
                swarm.peers[3].kill()
                time.sleep(float(seconds))
                print(f" …{swarm.add((4, 8)).peer_id[-8:]} joined, blocks 4:8.", flush=True)
                monitor.wait()
            except KeyboardInterrupt:
                monitor.terminate()


if __name__ == "__main__":
    main(*sys.argv[1:])
