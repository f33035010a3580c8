"""What `function_notes` records of a small program with files in the folders of the product."""

import subprocess
import sys
from pathlib import Path

import function_notes
import pytest

WORK = """
async def delegate(first, second):
    return await go_on(first, second)

async def go_on(first, second):
    await first.wait()
    first.clear()
    await second.wait()

def work_off(jobs, done):
    while job := jobs.get():
        done.put(job)

def call(function):
    return [function(number) for number in range(2)]

def double(number):
    return 2 * number
"""

OTHER = """
from dataclasses import dataclass

def tell():
    return Point(1)

@dataclass
class Point:
    x: int
"""


def record(folder: Path, program: str) -> set[tuple[int, str, str]]:
    """Return step, file and function of what a program runs; `mark[0]` is its current step."""
    root, notes = folder / "root", folder / "notes"
    for path, text in (("peer/work.py", WORK), ("client/other.py", OTHER), ("tests/own.py", OTHER)):
        (root / path).parent.mkdir(parents=True)
        (root / path).write_text(text)
    notes.mkdir()
    lead = "import function_notes, sys; mark = function_notes.open_mark(); sys.path.append('.')"

    subprocess.run(
        [sys.executable, "-P", "-c", f"{lead}\n{program}"],
        env=function_notes.prepare(root, notes),
        cwd=root,
        check=True,
    )
    return {(note.step, note.file, note.function) for note in function_notes.read_notes(notes)}


@pytest.mark.network
def test_notes_have_the_functions_of_a_step_and_no_imports(tmp_path: Path) -> None:
    noted = record(
        tmp_path,
        """
from peer import work
work.call(work.double)
mark[0] = 1
from client import other
import tests.own
mark[0] = 2
other.tell()
tests.own.tell()
""",
    )

    assert noted == {(2, "client/other.py", "tell")}


@pytest.mark.network
def test_notes_have_the_coroutine_that_goes_on_but_not_the_one_that_waits_for_it(
    tmp_path: Path,
) -> None:
    noted = record(
        tmp_path,
        """
import asyncio
from peer import work

async def main():
    first, second = asyncio.Event(), asyncio.Event()
    waiting = asyncio.create_task(work.delegate(first, second))
    await asyncio.sleep(0)
    mark[0] = 1
    first.set()
    while first.is_set():
        await asyncio.sleep(0)
    mark[0] = 0
    second.set()
    await waiting

asyncio.run(main())
""",
    )

    assert noted == {(1, "peer/work.py", "go_on")}


@pytest.mark.network
def test_notes_have_a_loop_of_a_thread_that_waited_when_the_step_began(tmp_path: Path) -> None:
    noted = record(
        tmp_path,
        """
import queue, threading
from peer import work

jobs, done = queue.SimpleQueue(), queue.SimpleQueue()
threading.Thread(target=work.work_off, args=(jobs, done)).start()
jobs.put("before")
done.get()
mark[0] = 1
jobs.put("within")
done.get()
mark[0] = 0
jobs.put("")
""",
    )

    assert noted == {(1, "peer/work.py", "work_off")}
