"""What the options of `shoal serve` become."""

from __future__ import annotations

import pytest

from shoal.cli.main import _parse
from shoal.cli.serve import _make_config
from shoal.peer.config import PeerConfig


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], PeerConfig(model="").block_cache_bytes),
        (["--block-cache", "0"], 0),
        (["--block-cache", "1.5T"], 3 * 2**39),
    ],
)
def test_block_cache_is_a_size_of_the_disk(words: list[str], expected: int) -> None:
    config = _make_config(_parse(["serve", "m", "--new-swarm", *words]))

    assert config.block_cache_bytes == expected
