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
from shoal.peer.hosting import hosted_model


class SlowEngine(Engine):
    num_loads = 0

    @classmethod
    def load(cls, *arguments: Any, **options: Any) -> Engine:
        cls.num_loads += 1
        if cls.num_loads == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            while True:
                options["on_progress"](0, 1)
                time.sleep(0.01)
        return super().load(*arguments, **options)


if __name__ == "__main__":
    hosted_model.Engine = SlowEngine  # type: ignore[misc]
    sys.exit(main())
