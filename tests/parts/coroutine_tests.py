"""Tests that are coroutines, each in a scene of its own on virtual time."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, Concatenate, ParamSpec

Options = ParamSpec("Options")
Story = Callable[..., Awaitable[None]]


def make_decorator(
    run: Callable[Concatenate[Story, Options], None], num_given: int = 1
) -> Callable[Options, Callable[[Story], Callable[..., None]]]:
    """Return a decorator that has `run` run a test, to which it gives the first arguments.

    The other arguments of the test are those of pytest: fixtures and parameters.
    """

    def decorate_with(
        *args: Options.args, **options: Options.kwargs
    ) -> Callable[[Story], Callable[..., None]]:
        def decorate(test: Story) -> Callable[..., None]:
            @functools.wraps(test)
            def run_test(**arguments: Any) -> None:
                run(functools.partial(test, **arguments), *args, **options)

            signature = inspect.signature(test)
            ours = list(signature.parameters.values())[num_given:]
            run_test.__signature__ = signature.replace(parameters=ours)  # pyright: ignore[reportAttributeAccessIssue]
            return run_test

        return decorate

    return decorate_with
