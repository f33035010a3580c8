"""Tests that are coroutines: each is run in a scene of its own, by the decorator of that scene."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

Story = Callable[..., Any]


def make_test(
    story: Story, play: Callable[..., None], *needed: str, num_scenes: int = 1
) -> Callable[..., None]:
    """Return the test that pytest calls with fixtures.

    A story has the scene as its first parameters, and fixtures as the others. `play` runs a
    function of the scene alone; it is called with that, and with the fixtures that it needs itself.
    """
    parameters = list(inspect.signature(story).parameters.values())[num_scenes:]
    told = [parameter.name for parameter in parameters]
    parameters += [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        for name in needed
        if name not in told
    ]

    @functools.wraps(story)
    def test(**fixtures: Any) -> None:
        own = {name: fixtures[name] for name in told}
        play(functools.partial(story, **own), *(fixtures[name] for name in needed))

    test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return test
