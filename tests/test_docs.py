"""The documents tell the truth: examples run, links lead somewhere, named things exist."""

import doctest
import importlib
import re
import runpy
from pathlib import Path

import pytest

from shoal.models.families.registry import FAMILIES
from shoal.protocol.net.frame_stream import Framing, Mark
from shoal.protocol.versions import MAX_VERSION

ROOT = Path(__file__).resolve().parents[1]
SOURCE_FOLDERS = ("protocol", "kernels", "models", "peer", "client", "cli")
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]


def name_of(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def prose_of(document: Path) -> str:
    """Return the text without its fenced code."""
    return re.sub(r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=re.M | re.S)


def anchors_of(document: Path) -> set[str]:
    """Return the anchors that the headings of a document get where it is rendered."""
    headings = re.findall(r"^#+ +(.+?) *$", prose_of(document), flags=re.M)
    kept = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in kept}


def modules_with_examples() -> list[str]:
    """Return every source module that shows an interpreter prompt, as it is imported."""
    folders = (ROOT / folder for folder in (*SOURCE_FOLDERS, "benchmarks"))
    files = (file for folder in folders for file in sorted(folder.rglob("*.py")))
    return [
        ".".join(("shoal", *file.relative_to(ROOT).with_suffix("").parts))
        .removeprefix("shoal.benchmarks.")
        .removesuffix(".__init__")
        for file in files
        if re.search(r"^\s*>>> ", file.read_text(encoding="utf-8"), flags=re.M)
    ]


@pytest.mark.parametrize("module", modules_with_examples())
def test_examples_in_docstrings_run(module: str) -> None:
    result = doctest.testmod(importlib.import_module(module))

    assert result.failed == 0
    assert result.attempted > 0, "the examples stand where doctest does not look"


def python_blocks() -> list[tuple[str, str]]:
    """Return every block of Python in docs/, with a name that says where it begins.

    Without those of first hours, which need a swarm: tests/network/test_first_hours.py runs them.
    """
    return [
        (f"{name_of(document)}:{text.count(chr(10), 0, block.start()) + 1}", block[1])
        for document in DOCUMENTS
        if document.is_relative_to(ROOT / "docs") and not document.match("first-hour-*.md")
        for text in [document.read_text(encoding="utf-8")]
        for block in re.finditer(r"^```python\n(.*?)^```", text, flags=re.M | re.S)
    ]


@pytest.mark.parametrize(
    ("where", "code"), [pytest.param(*block, id=block[0]) for block in python_blocks()]
)
def test_python_in_documents_runs(where: str, code: str) -> None:
    exec(compile(code, where, "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_relative_links_lead_to_existing_places(document: Path) -> None:
    links = re.findall(r"\]\(([^()\s]+)\)", prose_of(document))
    broken: list[str] = []
    for link in links:
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        if not target.exists() or (anchor and anchor not in anchors_of(target)):
            broken.append(link)

    assert not broken


def test_documents_list_every_family() -> None:
    text = (ROOT / "docs" / "generating.md").read_text(encoding="utf-8")
    (families,) = re.findall(r"\| native blocks \|(.*)", text)

    assert set(re.findall(r"`(\w+)`", families)) == set(FAMILIES)


def test_documents_start_private_peers_with_a_serve_code() -> None:
    """The owner's code can remove peers and make codes: it stays off machines that serve."""
    commands = [
        line.strip()
        for document in DOCUMENTS
        for line in document.read_text(encoding="utf-8").replace("\\\n", "").splitlines()
        if line.strip().startswith("shoal ")
    ]
    made = [re.search(r"--role (\w+) --out (\S+)", line) for line in commands]
    roles = {f"@{found[2]}": found[1] for found in made if found}
    given = [re.search(r"^shoal serve .*--join (@\S+)", line) for line in commands]
    codes = [found[1] for found in given if found]

    assert codes, "no document starts a private swarm"
    assert {code: roles.get(code, "owner") for code in codes} == dict.fromkeys(codes, "serve")


def test_tour_names_existing_files() -> None:
    text = (ROOT / "docs" / "tour.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w.-]+(?:/[\w.-]+)*/?)`", text))
    paths = {name for name in named if "/" in name or re.search(r"\.(py|md|toml|txt|proto)$", name)}

    assert paths, "the tour names no file"
    assert not [path for path in sorted(paths) if not (ROOT / path).exists()]


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "docs/testing.md"])
def test_documents_name_existing_make_targets(name: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.M))
    text = (ROOT / name).read_text(encoding="utf-8")
    named = set(re.findall(r"`make ([a-z-]+)", text))
    for code in re.findall(r"^```\w*\n(.*?)^```", text, flags=re.M | re.S):
        named |= set(re.findall(r"^\s*(?:\$ )?make ([a-z-]+)", code, flags=re.M))

    assert named, f"{name} names no target"
    assert named <= targets


def test_protocol_tables_are_those_of_the_code() -> None:
    drawing = runpy.run_path(str(ROOT / "docs" / "draw_protocol.py"))
    text = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")

    assert text == drawing["draw"](text), "run `python docs/draw_protocol.py`"
    assert "**ROLLBACK**" in text
    assert len(re.findall(r"^\| `MAX_", text, flags=re.M)) == len(
        re.findall(r"^MAX_", (ROOT / "protocol" / "limits.py").read_text(), flags=re.M)
    )


def test_protocol_names_its_version_and_every_mark() -> None:
    text = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
    streams = text.partition("## Streams and frames")[2].partition("## Messages")[0]

    assert f"\nVersion {MAX_VERSION}. " in text
    assert not [
        mark.name for mark in Mark if f"`{Framing().pack_mark(mark).hex(' ')}`" not in streams
    ]
