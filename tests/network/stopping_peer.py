"""A `shoal` that is asked to end (SIGTERM) while it loads its second span, which takes for ever.

python stopping_peer.py serve MODEL ...
"""

import os
import signal
import sys
import time
from typing import Any

from shoal.cli.main import main
from shoal.peer.engine.engine import Engine
from shoal.peer.engine.loading.engine_loader import load_engine
from shoal.peer.hosting import span_loader


class SlowLoader:
    num_loads = 0

    def __call__(self, *arguments: Any, **options: Any) -> Engine:
        self.num_loads += 1
        if self.num_loads == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            while True:
                options["on_progress"](0, 1)
                time.sleep(0.01)
        return load_engine(*arguments, **options)


if __name__ == "__main__":
    span_loader.load_engine = SlowLoader()
    sys.exit(main())
