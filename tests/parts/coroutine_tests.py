"""Tests that are coroutines, each in a scene of its own on virtual time."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, Concatenate, ParamSpec

Options = ParamSpec("Options")
Story = Callable[..., Awaitable[None]]


def make_test(
    story: Story, run: Callable[..., None], *fixtures: str, num_given: int = 1
) -> Callable[..., None]:
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
    def test(**arguments: Any) -> None:
        told = {name: arguments[name] for name in names}
        run(functools.partial(story, **told), *(arguments[name] for name in fixtures))

    test.__signature__ = inspect.Signature(ours)  # pyright: ignore[reportAttributeAccessIssue]
    return test


def make_decorator(
    run: Callable[Concatenate[Story, Options], None], num_given: int = 1
) -> Callable[Options, Callable[[Story], Callable[..., None]]]:
    """Return a decorator, with the options of `run`, that makes a test of a coroutine function."""

    def decorate_with(
        *args: Options.args, **options: Options.kwargs
    ) -> Callable[[Story], Callable[..., None]]:
        return lambda story: make_test(
            story, lambda told: run(told, *args, **options), num_given=num_given
        )

    return decorate_with
