"""The files of a run's tokenizer: read beside its corpus, and checked by their digests."""

from __future__ import annotations

import errno
import hashlib
import json
from pathlib import Path

from ..protocol.errors import UsageError
from ..protocol.runs.training_run import Corpus, TokenizerFile

MAX_TOKENIZER_FILE_BYTES = 32 * 2**20
"""The largest tokenizers of published models have 20 MB; peers hold the files in memory."""


def read_tokenizer(corpus: Corpus, folder: Path) -> dict[str, bytes]:
    """Return the files of a corpus' tokenizer by their names.

    Raises UsageError, which names the file, where one is missing, too large, has changed since the
    run file was written, or names code that transformers would download.
    """
    return {file.path: _read_file(file, folder / file.path) for file in corpus.tokenizer}


def _read_file(file: TokenizerFile, path: Path) -> bytes:
    try:
        if path.exists() and not path.is_file():
            raise OSError(errno.EINVAL, "it is no regular file")
        with path.open("rb") as opened:
            content = opened.read(MAX_TOKENIZER_FILE_BYTES + 1)
    except OSError as error:
        raise UsageError(f"cannot read tokenizer file {path}: {error.strerror}") from error
    if len(content) > MAX_TOKENIZER_FILE_BYTES:
        raise UsageError(f"tokenizer file {path} has more than {MAX_TOKENIZER_FILE_BYTES} bytes")
    if hashlib.sha256(content).hexdigest() != file.sha256:
        raise UsageError(f"tokenizer file {path} is not the one of the run: its SHA-256 differs")
    if file.path == "tokenizer_config.json" and _names_code(content):
        raise UsageError(
            f"tokenizer file {path} names code to download (auto_map): a run takes tokenizers of "
            "transformers itself only"
        )
    return content


def _names_code(content: bytes) -> bool:
    try:
        return "auto_map" in json.loads(content)
    except (ValueError, TypeError):
        return False  # no configuration: transformers refuses it
