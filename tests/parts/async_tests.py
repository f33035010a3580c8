"""A pytest plugin: `async def` tests run on the virtual loop, and on a real one with processes."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
from virtual_time import VirtualEventLoop

_PATIENCE_SECONDS = 180.0

RunAsync = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture
def run_async(request: pytest.FixtureRequest) -> Iterator[RunAsync]:
    """Runs coroutines, one after the other, on the loop of one test.

    That is a real loop where the test is marked `network`. Fixtures that begin or end with
    something to wait for use it, and files may replace it.
    """
    is_real = request.node.get_closest_marker("network") is not None
    with asyncio.Runner(loop_factory=None if is_real else VirtualEventLoop) as runner:
        yield runner.run


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
            item.fixturenames[:] = dict.fromkeys([*item.fixturenames, "run_async"])


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    found = pyfuncitem.funcargs
    arguments = {name: found[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    run_async: Any = found["run_async"]
    test = pyfuncitem.obj(**arguments)
    # A virtual loop finds out by itself that nothing will happen any more.
    is_real = pyfuncitem.get_closest_marker("network") is not None
    run_async(_end_in_time(test) if is_real else test)
    return True


async def _end_in_time(test: Coroutine[Any, Any, Any]) -> None:
    async with asyncio.timeout(_PATIENCE_SECONDS):
        await test
