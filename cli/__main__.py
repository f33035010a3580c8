"""The entry point of the `shoal` program; `python -m shoal.cli` is the same as `shoal`."""

import sys

from .terminal.interrupts import quit_at_once


def run() -> int:
    """Run the program's command line; Ctrl-C is quiet from its first to its last moment."""
    quit_at_once()
    from .main import main  # begins to import in earnest

    try:
        return main()
    finally:
        quit_at_once()


if __name__ == "__main__":
    sys.exit(run())
