"""A pytest plugin: `async def` tests run on the virtual loop, and on a real one with processes.

A test may also be a story: a coroutine function that a scene gives its first arguments.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, Concatenate, ParamSpec

import pytest
from virtual_time import VirtualEventLoop

_PATIENCE_SECONDS = 180.0

RunAsync = Callable[[Coroutine[Any, Any, Any]], Any]
Options = ParamSpec("Options")
Story = Callable[..., Awaitable[None]]


def make_test(
    story: Story, run: Callable[..., Awaitable[None]], *fixtures: str, num_given: int = 1
) -> Story:
    """Return a test for pytest of a coroutine function, to which `run` gives the first arguments.

    The others are fixtures and parameters. `run` itself gets the fixtures that are named.
    """
    ours = list(inspect.signature(story).parameters.values())[num_given:]
    names = [parameter.name for parameter in ours]
    ours += [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        for name in fixtures
        if name not in names
    ]

    @functools.wraps(story)
    async def test(**arguments: Any) -> None:
        told = {name: arguments[name] for name in names}
        await run(functools.partial(story, **told), *(arguments[name] for name in fixtures))

    test.__signature__ = inspect.Signature(ours)  # pyright: ignore[reportAttributeAccessIssue]
    return test


def make_decorator(
    run: Callable[Concatenate[Story, Options], Awaitable[None]],
    num_given: int = 1,
    *,
    is_real: bool = False,
) -> Callable[Options, Callable[[Story], Story]]:
    """Return a decorator, with the options of `run`, that makes a test of a coroutine function.

    `is_real`: it needs a real loop.
    """

    def decorate_with(*args: Options.args, **options: Options.kwargs) -> Callable[[Story], Story]:
        def decorate(story: Story) -> Story:
            test = make_test(story, lambda told: run(told, *args, **options), num_given=num_given)
            return pytest.mark.real_loop(test) if is_real else test

        return decorate

    return decorate_with


@pytest.fixture
def run_async(request: pytest.FixtureRequest) -> Iterator[RunAsync]:
    """Runs coroutines, one after the other, on the loop of one test.

    That is a real loop where the test is marked `network` or `real_loop`. Fixtures that begin or
    end with something to wait for use it, and files may replace it.
    """
    with asyncio.Runner(
        loop_factory=None if _is_real(request.node) else VirtualEventLoop
    ) as runner:
        yield runner.run


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "real_loop: a coroutine that waits for real threads")


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
    run_async(_end_in_time(test) if _is_real(pyfuncitem) else test)
    return True


def _is_real(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) for name in ("network", "real_loop"))


async def _end_in_time(test: Coroutine[Any, Any, Any]) -> None:
    async with asyncio.timeout(_PATIENCE_SECONDS):
        await test
