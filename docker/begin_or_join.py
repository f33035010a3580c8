"""Run the first peer of a swarm: begin the swarm or, where it runs already, join it.

Usage: begin_or_join.py serve MODEL OPTIONS, without --new-swarm.
"""

import os
import signal
import subprocess
import sys

_WRONG_USAGE = 2
"""Exit code of `shoal serve --new-swarm` where the swarm of the code runs already."""


def main(words: list[str]) -> int:
    """Return the peer's exit code; signals are passed on to it."""
    with subprocess.Popen(["shoal", *words, "--new-swarm"]) as peer:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: peer.send_signal(number))
        code = peer.wait()
    if code == _WRONG_USAGE:
        os.execvp("shoal", ["shoal", *words])
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
