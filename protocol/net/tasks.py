"""The end of tasks that are no longer needed."""

import asyncio
from collections.abc import Iterable
from typing import Any


async def cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they have ended, however they do."""
    cancelled = list(tasks)
    for task in cancelled:
        task.cancel()
    if cancelled:
        await asyncio.wait(cancelled)
