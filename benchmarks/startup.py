"""How long a swarm takes to be ready, and what importing the client costs."""

import subprocess
import sys
import time

from _report import STORIES, Figure, parse_arguments, report

from shoal.peer.local_swarm import LocalSwarm

SPANS = [(0, 3), (3, 6), (3, 6), (6, 8)]


def measure_import_seconds(module: str) -> float:
    """Return the seconds a fresh interpreter needs for one import."""
    started_at = time.perf_counter()
    subprocess.run([sys.executable, "-P", "-c", f"import {module}"], check=True)
    return time.perf_counter() - started_at


def measure_ready_seconds() -> float:
    """Return the seconds until four peers of the bundled model are announced."""
    started_at = time.perf_counter()
    with LocalSwarm(STORIES, spans=SPANS):
        return time.perf_counter() - started_at


def main() -> None:
    """Measure everything and print it."""
    options = parse_arguments(__doc__ or "")
    measure_import_seconds("shoal.client")  # fills the disk cache
    ready = min(measure_ready_seconds() for _ in range(2))
    report(
        "Starting",
        [
            Figure("import torch", measure_import_seconds("torch"), "s"),
            Figure("import shoal.client", measure_import_seconds("shoal.client"), "s"),
            Figure("4 peers of the bundled model ready", ready, "s", "< 15", ready < 15),
        ],
        options.json,
    )


if __name__ == "__main__":
    main()
