"""What `shoal generate --adapter` takes: folders, and digests of published adapters."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.cli.main import _parse
from shoal.cli.options.adapter_folder import find_adapter
from shoal.protocol.errors import UsageError

DIGEST = "7b06" + "0123456789abcdef" * 3 + "c0de00000000"


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def put(path: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text("{}")


@pytest.mark.parametrize("given", [DIGEST, DIGEST.upper(), f" {DIGEST}\n"])
def test_digest_is_taken_in_capitals_and_with_white_space(given: str) -> None:
    options = _parse(["generate", "m", "p", "--adapter", given])

    assert find_adapter(options.adapter) == {"active_adapter": DIGEST}


def test_folder_with_the_name_of_a_digest_wins() -> None:
    put(f"{DIGEST}/adapter_config.json")

    assert find_adapter(DIGEST) == {"active_adapter": Path(DIGEST)}


def test_folders_of_prompts_and_of_an_adapter_are_told_apart() -> None:
    put("prompts/tuning.json")
    put("adapter/adapter_config.json")

    assert find_adapter("prompts") == {"trained": Path("prompts")}
    assert find_adapter("adapter") == {"active_adapter": Path("adapter")}
    assert find_adapter(None) == {}


def test_file_and_folder_without_an_adapter_are_named_as_such() -> None:
    put("adapter/adapter_config.json")
    put("model/config.json")

    with pytest.raises(UsageError, match=r"^model holds neither an adapter nor prompts"):
        find_adapter("model")

    with pytest.raises(UsageError, match=r"_config\.json is a file; --adapter takes a folder"):
        find_adapter("adapter/adapter_config.json")


@pytest.mark.parametrize("given", ["my-adapter", DIGEST[1:], DIGEST + "0", "g" + DIGEST[1:]])
def test_what_is_neither_is_told_both_possibilities(given: str) -> None:
    with pytest.raises(UsageError) as raised:
        find_adapter(given)

    assert str(raised.value) == (
        f"{given} is neither an existing folder nor the digest of a published adapter (64 "
        "hexadecimal digits); --adapter takes one of them"
    )
