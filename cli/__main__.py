"""Makes `python -m shoal.cli` the same as `shoal`."""

import sys

from .main import main

if __name__ == "__main__":
    sys.exit(main())
