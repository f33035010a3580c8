"""The examples and the notebook run from top to bottom, and learn what they say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.network, pytest.mark.slow]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MAX_LINES = 40


def run(script: Path, folder: Path) -> list[str]:
    """Run a script in a folder; return the lines that it prints."""
    process = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", str(script)],
        cwd=folder,
        env=os.environ | {"MPLBACKEND": "Agg", "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.splitlines()


@pytest.mark.parametrize("name", ["prompt_classifier.py"])
def test_examples_are_short(name: str) -> None:
    assert len((EXAMPLES / name).read_text(encoding="utf-8").splitlines()) < MAX_LINES


def test_classifier_is_right_about_sentences_that_it_never_saw(tmp_path: Path) -> None:
    *_, last = run(EXAMPLES / "prompt_classifier.py", tmp_path)

    assert last.startswith("unseen sentences: loss 0.")
    assert last.endswith((", 40/40 right", ", 39/40 right", ", 38/40 right"))
