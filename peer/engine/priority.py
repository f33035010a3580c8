"""How a thread that computes stands to the event loops beside it, for the operating system."""

import contextlib
import os
import sys
import threading

_NICENESS = 4
"""More than that of event loops, of this process and of others: they have little to do, and
somebody waits for it, while computing takes whatever time there is."""


def give_way_to_loops() -> None:
    """Let everything else on this machine come before the calling thread, and threads it starts.

    Where threads have no priority of their own, which is everywhere but on Linux, nothing changes.
    """
    if sys.platform != "linux":
        return
    own = threading.get_native_id()
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, own, os.getpriority(os.PRIO_PROCESS, own) + _NICENESS)
