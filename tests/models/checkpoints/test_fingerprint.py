"""The fingerprint of weights, and the file in which it is remembered."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import warm_python
from fake_hub import READ_HUB_SETTINGS, FakeHub, serving_hub

from shoal.models.checkpoints import fingerprint
from shoal.models.checkpoints.checkpoint import Checkpoint
from shoal.models.checkpoints.fingerprint import (
    CACHE_FILE,
    MAX_CACHED_FILES,
    check_download,
    compute_fingerprint,
)
from shoal.protocol.errors import ModelError

NUM_BYTES = 2**20
PLANTED = "f" * 64


@pytest.fixture(autouse=True)
def low_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A megabyte is large, and read in no time."""
    monkeypatch.setattr(fingerprint, "MIN_CACHED_BYTES", NUM_BYTES)


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A file that is worth remembering. It has holes in place of zeros, so it is made at once."""
    path = tmp_path / "large"
    path.touch()
    os.truncate(path, NUM_BYTES)
    return path


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "home" / "cache"


def write_byte(path: Path, offset: int, value: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(bytes([value]))


def digest_of(path: Path) -> str:
    """Return the fingerprint of one file, from nothing."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return fingerprint_of_digest(digest)


def fingerprint_of_digest(*digests: str) -> str:
    return hashlib.sha256("".join(digests).encode()).hexdigest()[:40]


def plant_digest(cache: Path, digest: str = PLANTED) -> None:
    """Replace the digest of every remembered file, so that one sees where it is used."""
    file = cache / CACHE_FILE
    entries: dict[str, str] = json.loads(file.read_text())
    changed = {path: entry.rpartition(" ")[0] + " " + digest for path, entry in entries.items()}
    file.write_text(json.dumps(changed))


@pytest.mark.parametrize("offset", [0, 100_000, NUM_BYTES // 2 + 12_345, NUM_BYTES - 1])
def test_every_byte_counts(large: Path, cache: Path, offset: int) -> None:
    before = compute_fingerprint([large], cache)

    write_byte(large, offset, 1)

    assert compute_fingerprint([large], cache) != before


def test_contents_and_order_count_and_names_do_not(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "copies").mkdir()
    paths: list[Path] = []
    for name, content in (("a", b"one"), ("b", b"two"), ("copies/c", b"one")):
        (tmp_path / name).write_bytes(content)
        paths.append(tmp_path / name)
    one, two, copy = paths

    assert compute_fingerprint([one, two], cache) == compute_fingerprint([copy, two], cache)
    assert compute_fingerprint([one, two], cache) != compute_fingerprint([two, one], cache)


def test_large_file_is_read_once(large: Path, cache: Path) -> None:
    first = compute_fingerprint([large], cache)
    assert first == digest_of(large)
    assert compute_fingerprint([large], cache) == first

    plant_digest(cache)

    assert compute_fingerprint([large], cache) == fingerprint_of_digest(PLANTED)
    assert (cache / CACHE_FILE).stat().st_mode & 0o777 == 0o600
    assert [path.name for path in cache.iterdir()] == [CACHE_FILE]


def test_link_to_a_large_file_is_the_same_file(large: Path, cache: Path) -> None:
    link = large.with_name("link")
    link.symlink_to(large)
    compute_fingerprint([large], cache)
    plant_digest(cache)

    assert compute_fingerprint([link], cache) == fingerprint_of_digest(PLANTED)


def rewrite(path: Path) -> None:
    write_byte(path, 77, 7)


def rewrite_and_set_the_time_back(path: Path) -> None:
    before = path.stat()
    write_byte(path, 77, 7)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace_by_another(path: Path) -> None:
    other = path.with_name("other")
    other.touch()
    os.truncate(other, NUM_BYTES)
    write_byte(other, 77, 7)
    os.utime(other, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    other.replace(path)


def grow(path: Path) -> None:
    os.truncate(path, NUM_BYTES + 1)


@pytest.mark.parametrize(
    "change", [rewrite, rewrite_and_set_the_time_back, replace_by_another, grow]
)
def test_changed_file_is_read_again(
    large: Path, cache: Path, change: Callable[[Path], None]
) -> None:
    compute_fingerprint([large], cache)
    plant_digest(cache)

    change(large)

    assert compute_fingerprint([large], cache) == digest_of(large)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff", b"[]", b"7", b"[" * 100_000, b"{}", b" " * (9 * 2**20)],
    ids=["empty", "cut", "binary", "list", "number", "deep", "nothing", "huge"],
)
def test_damaged_cache_is_ignored_and_replaced(large: Path, cache: Path, content: bytes) -> None:
    cache.mkdir(parents=True)
    (cache / CACHE_FILE).write_bytes(content)

    assert compute_fingerprint([large], cache) == digest_of(large)
    plant_digest(cache)
    assert compute_fingerprint([large], cache) == fingerprint_of_digest(PLANTED)


@pytest.mark.parametrize("digest", ["", "f" * 63, "f" * 65, "F" * 64, "g" * 64, "../etc/passwd"])
def test_damaged_entry_is_ignored(large: Path, cache: Path, digest: str) -> None:
    compute_fingerprint([large], cache)
    plant_digest(cache, digest)

    assert compute_fingerprint([large], cache) == digest_of(large)


@pytest.mark.parametrize("entry", [7, None, [], {}, "", " " * 5])
def test_entry_of_another_form_is_ignored(large: Path, cache: Path, entry: object) -> None:
    cache.mkdir(parents=True)
    (cache / CACHE_FILE).write_text(json.dumps({str(large): entry}))

    assert compute_fingerprint([large], cache) == digest_of(large)


def make_link(file: Path) -> None:
    file.replace(file.with_name("elsewhere"))
    file.symlink_to(file.with_name("elsewhere"))


def make_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def make_writable_by_others(file: Path) -> None:
    file.chmod(0o622)


@pytest.mark.parametrize("change", [make_link, make_pipe, make_writable_by_others])
def test_cache_that_may_not_be_ours_is_not_believed(
    large: Path, cache: Path, change: Callable[[Path], None]
) -> None:
    compute_fingerprint([large], cache)
    plant_digest(cache)

    change(cache / CACHE_FILE)

    assert compute_fingerprint([large], cache) == digest_of(large)


def test_cache_forgets_the_oldest(large: Path, cache: Path) -> None:
    cache.mkdir(parents=True)
    old = {f"/old/{number}": "entry" for number in range(MAX_CACHED_FILES)}
    (cache / CACHE_FILE).write_text(json.dumps(old))

    compute_fingerprint([large], cache)

    kept = list(json.loads((cache / CACHE_FILE).read_text()))
    assert kept == [*list(old)[1:], str(large)]


def test_small_files_leave_no_trace(tmp_path: Path, cache: Path) -> None:
    small = tmp_path / "small"
    small.touch()
    os.truncate(small, NUM_BYTES - 1)

    compute_fingerprint([small], cache)

    assert not cache.exists()


def test_cache_that_cannot_be_written_costs_time_only(large: Path) -> None:
    below_a_file = large / "cache"

    assert compute_fingerprint([large], below_a_file) == digest_of(large)


def write_checkpoint(directory: Path, weights: Path) -> None:
    """Write a model directory whose only tensor are the bytes of a file."""
    num_bytes = weights.stat().st_size
    entry = {"dtype": "I8", "shape": [num_bytes], "data_offsets": [0, num_bytes]}
    header = json.dumps({"weights": entry}).encode()
    directory.mkdir(parents=True)
    (directory / "config.json").write_text('{"model_type": "llama"}')
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
    os.truncate(directory / "model.safetensors", 8 + len(header) + num_bytes)


def test_checkpoint_is_remembered_where_it_is_told_to(
    tmp_path: Path, large: Path, cache: Path
) -> None:
    model = tmp_path / "model"
    write_checkpoint(model, large)

    revision = Checkpoint.open(model, cache_directory=cache).revision
    assert revision == digest_of(model / "model.safetensors")
    plant_digest(cache)

    planted = Checkpoint.open(model, cache_directory=cache).revision
    assert planted == fingerprint_of_digest(PLANTED)


HUB_SCRIPT = """
import sys
from shoal.models.checkpoints.checkpoint import Checkpoint
from shoal.protocol.errors import ModelError

for _ in sys.stdin:
    try:
        checkpoint = Checkpoint.open("org/model")
        line = f"{checkpoint.revision} {Checkpoint.open(checkpoint.directory).revision}"
    except ModelError as error:
        line = str(error)
    print(line, flush=True)
"""


@contextmanager
def opening_from_hub(hub: FakeHub, home: Path) -> Iterator[Callable[[], str]]:
    """Yield what opens a model; it returns its revision and that of its folder, or the error."""
    with warm_python.Popen(
        [sys.executable, "-P", "-c", READ_HUB_SETTINGS + HUB_SCRIPT],
        env={**os.environ, **hub.make_environment(home)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        commands, answers = process.stdin, process.stdout

        def open_model() -> str:
            commands.write("\n")
            commands.flush()
            return answers.readline().rstrip()

        yield open_model
        commands.close()
    assert process.returncode == 0


@pytest.mark.network
@pytest.mark.slow
def test_download_with_other_bytes_than_the_hub_promised_is_refused(
    tmp_path: Path, large: Path
) -> None:
    model, home, commit = tmp_path / "model", tmp_path / "home", "a" * 40
    write_checkpoint(model, large)
    weights = model / "model.safetensors"
    blobs = home / "hub" / "hub" / "models--org--model" / "blobs"
    blob = blobs / hashlib.sha256(weights.read_bytes()).hexdigest()
    is_right = f"{commit} {digest_of(weights)}"

    with (
        serving_hub({commit: model}, num_damaged=1) as hub,
        opening_from_hub(hub, home) as open_model,
    ):
        arrived = open_model()
        blob.unlink()
        repeated = open_model()
        write_byte(blob, NUM_BYTES // 2, 1)
        changed = open_model()

    assert arrived == changed
    assert arrived == (
        "model.safetensors does not have the SHA-256 that the Hub gave for it; delete "
        f"{blob} and repeat the command, which downloads it again"
    )
    assert repeated == is_right


def test_download_is_read_once(tmp_path: Path, large: Path, cache: Path) -> None:
    digest = hashlib.sha256(large.read_bytes()).hexdigest()
    blob = large.rename(tmp_path / digest)

    check_download(blob, cache)

    plant_digest(cache)
    with pytest.raises(ModelError, match=f"delete {blob} "):  # by what is remembered
        check_download(blob, cache)


def test_small_file_of_the_hub_has_no_digest_in_its_name(tmp_path: Path, cache: Path) -> None:
    blob = tmp_path / ("a" * 40)
    blob.write_bytes(b"{}")

    check_download(blob, cache)

    assert not cache.exists()
