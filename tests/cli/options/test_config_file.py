"""`shoal serve --config`: what a file says, unless the command line says otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.cli.main import _parse

FILE = """
model = "org/model"
new-swarm = true
kv-memory = "2M"
drain = 3.5
relay = false
hours = ["22:00-07:00", "12:00-13:00"]
blocks = "0:4"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "peer.toml"
    path.write_text(FILE)
    return path


def test_file_says_what_the_command_line_does_not(file: Path) -> None:
    options = _parse(["serve", "--config", str(file)])

    assert (options.model, options.new_swarm, options.relay) == ("org/model", True, False)
    assert (options.kv_memory, options.drain, options.blocks) == (2 * 2**20, 3.5, "0:4")
    assert [str(hours) for hours in options.hours] == ["22:00-07:00", "12:00-13:00"]


def test_command_line_wins_also_over_what_it_excludes(file: Path) -> None:
    words = "other --kv-memory 4M --hours 01:00-02:00 --num-blocks 2 --relay".split()
    options = _parse(["serve", *words, f"--config={file}"])

    assert (options.model, options.kv_memory, options.relay) == ("other", 4 * 2**20, True)
    assert [str(hours) for hours in options.hours] == ["01:00-02:00"]
    assert (options.blocks, options.num_blocks) == (None, 2)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('kv-memry = "1G"', "there is no option 'kv-memry'; did you mean kv-memory?"),
        ("config = 'other.toml'", "there is no option 'config'"),
        ("kv-memory = '1 sack'", "kv-memory: '1 sack' is not a size"),
        ("new-swarm = 'yes'", "new-swarm is true or false, not 'yes'"),
        ("weights = 'int3'", "weights is one of int8"),
        ("drain = [1, 2]", "drain is one value, as on the command line, not [1, 2]"),
        ("hours = '9 to 5'", "hours: hours are given as 22:00-07:00, not '9 to 5'"),
        ("blocks = '0:4'\nnum-blocks = 4", "blocks and num-blocks exclude each other"),
        ("drain =", "is no TOML file"),
        ("name = lab", "texts need quotes: Invalid value (at line 1"),
    ],
)
def test_mistake_in_the_file_is_named(
    line: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "peer.toml"
    path.write_text(line)

    with pytest.raises(SystemExit) as end:
        _parse(["serve", "m", "--config", str(path)])

    error = capsys.readouterr().err
    assert end.value.code == 2
    assert said in error
    assert error.count("\n") == 1


def test_missing_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _parse(["serve", "m", "--config", "nowhere.toml"])

    assert "cannot read nowhere.toml (--config): No such file" in capsys.readouterr().err
