"""A `shoal` on a machine whose clock is ahead: `python skewed_peer.py SECONDS serve MODEL ...`."""

import sys
import time

from shoal.cli.main import main

if __name__ == "__main__":
    skew_seconds = float(sys.argv[1])
    true_time = time.time
    time.time = lambda: true_time() + skew_seconds
    sys.exit(main(sys.argv[2:]))
