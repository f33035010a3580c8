"""Stories of a swarm that are told of a chain, and in part of a star."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import pytest


def at_hops(*hops: int, in_star: int) -> pytest.MarkDecorator:
    """Tell a story of each of some hops in a chain, and of one of them in a star.

    The other hops of the star are thorough: `test_failures.py` loses every hop in both.
    """
    return in_chains("hop", {str(hop): hop for hop in hops}, in_star=[str(in_star)])


def in_chains(
    name: str, cases: Mapping[str, object], *, in_star: Collection[str]
) -> pytest.MarkDecorator:
    """Tell a story with each of some cases in a chain, and with those named in a star."""
    told = [
        pytest.param(
            delivery,
            value,
            id=f"{delivery}-{case}",
            marks=() if delivery == "chain" or case in in_star else pytest.mark.thorough,
        )
        for delivery in ("chain", "star")
        for case, value in cases.items()
    ]
    return pytest.mark.parametrize(("delivery", name), told)
