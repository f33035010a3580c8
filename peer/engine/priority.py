"""How a thread that computes stands to the event loops beside it, for the operating system."""

import contextlib
import os
import sys
import threading

_NICENESS = 4
"""More than that of event loops, of this process and of others: they have little to do, and
somebody waits for it, while computing takes whatever time there is. It still gets a quarter of a
processor that others want as well."""


def give_way_to_loops() -> None:
    """Leave the calling thread, and threads it starts, a smaller share than others have.

    Others are those that the operating system weighs against it: a session's or a container's
    threads, where it groups them. Where threads have no priority of their own, which is everywhere
    but on Linux, nothing changes.
    """
    if sys.platform != "linux":
        return
    own = threading.get_native_id()
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, own, os.getpriority(os.PRIO_PROCESS, own) + _NICENESS)
