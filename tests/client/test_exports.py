"""The names of `shoal.client`, which are imported when they are first used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import shoal.client


@pytest.mark.parametrize("name", shoal.client.__all__)
def test_name_that_is_exported_is_there(name: str) -> None:
    assert getattr(shoal.client, name) is not None
    assert name in dir(shoal.client)


def test_name_that_is_not_exported_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'DistributedNothing'"):
        _ = shoal.client.DistributedNothing  # pyright: ignore[reportAttributeAccessIssue]


def test_import_of_the_client_takes_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, shoal.client, shoal.client.doctor.served_models;"
        "sys.exit(' '.join({'torch', 'transformers', 'hivemind'} & set(sys.modules)))"
    )

    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)

    assert done.stderr.strip() == ""
