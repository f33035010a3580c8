"""The shape of the source tree: its rooms, their imports, what is installed, and sizes.

Sources are read with `ast` and not imported, except where the question is what an import loads.
A room is a folder with Python files. Every import counts as an arrow: at the top of a file, inside
a function, or below TYPE_CHECKING. Imports by name (`import_module`) would hide some.
"""

import ast
import gc
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import resolve_name
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

ARROWS = {
    "protocol": {"protocol"},
    "kernels": {"kernels"},
    "models": {"models", "kernels", "protocol"},
    "peer": {"peer", "models", "kernels", "protocol"},
    "client": {"client", "models", "kernels", "protocol"},
    "cli": {"cli", "client", "peer", "models", "kernels", "protocol"},
}
"""Which of our folders each folder may import."""

DOORS = {
    "hivemind": {"protocol/net/dht/", "protocol/net/libp2p/"},
    "google": {"protocol/messages/codec.py", "peer/operating/operator_server.py"},
    "grpc": {"peer/operating/operator_client.py", "peer/operating/operator_server.py"},
    "bitsandbytes": {"kernels/"},
    "triton": {
        "kernels/linear/triton_int8.py",
        "kernels/layers/triton_rows.py",
        "kernels/attention/triton_attention.py",
        "kernels/attention/triton_states.py",
    },
    "uvloop": {"cli/"},
    "miniupnpc": {"protocol/net/relays/port_mapping.py"},
}
"""The only files or folders (with a slash at the end) that import a dependency."""

LAZY_NAMES = {"client/__init__.py", "protocol/net/libp2p/hivemind_packages.py"}
"""Files whose names are imported when they are first used (PEP 562): ours, which that file imports
below TYPE_CHECKING as well, and hivemind's."""

BENCHMARKS = {folder.parent.name for folder in (ROOT / "benchmarks").glob("*/__init__.py")}
"""Packages of benchmarks, under the names by which they import each other."""

IMPURE_MODULES = {
    "a task or a thread": {"asyncio", "concurrent", "multiprocessing", "queue", "threading"},
    "a clock": {"datetime", "sched", "time"},
    "a socket": {"grpc", "hivemind", "http", "select", "selectors", "socket", "ssl", "urllib"},
    "a disk or a process": {"io", "os", "pathlib", "shutil", "signal", "subprocess", "tempfile"},
    "the process around it": {"logging", "sys", "uvloop"},
    "a tensor library": {"numpy", "torch", "transformers"},
}
"""What protocol/*.py may not import, and what it would get hold of."""

IMPORT_NAMES = {
    "grpcio": "grpc",
    "grpcio-health-checking": "grpc_health",
    "grpcio-reflection": "grpc_reflection",
    "protobuf": "google",
}
"""Distributions whose import name differs from their own."""

NAMES_OF_OTHERS = {
    "_UNIX_SOCKET_PREFIX": "hivemind",
    "_attn_implementation": "transformers",
    "_make_process_args": "hivemind",
    "_scheduled": "asyncio",
}
"""Private names of dependencies that tests replace, and whose they are."""
DRAWER_NAMES = frozenset({"base", "common", "handler", "helpers", "manager", "misc", "utils"})
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
MAX_CONSTRUCTOR_PARAMETERS = 6
MAX_IMPORTS = 15
"""Files of ours that one file imports."""
MAX_FLOORS = 12
"""Files below an entry point, on the longest chain of imports. It only shrinks."""
COMMAND_TABLE = "cli/command_table.py"
"""It imports the one command that is chosen: each is an entry point of its own, from which floors
are counted, and there may be as many as there are."""
UNTESTED_ROOMS = {"kernels/native"}
"""Its C is called by the kernels in Python, whose tests are those of both."""
ROOM_FILES = range(2, 13)
"""Python files of a room beside its `__init__.py`."""


class Import(NamedTuple):
    """One import statement: where it stands, what it names from the top, and how it is written."""

    where: str
    target: str
    is_relative: bool

    @property
    def top(self) -> str:
        return self.target.split(".")[0]


@pytest.fixture(scope="module", autouse=True)
def no_search_for_garbage() -> Iterator[None]:
    """Syntax trees are none, and looking through them takes longer than making them."""
    gc.disable()
    yield
    gc.enable()


def source_files(*folders: str) -> list[Path]:
    """Return the Python files of our folders (all by default) that people write."""
    return [
        file
        for folder in folders or ARROWS
        for file in sorted((ROOT / folder).rglob("*.py"))
        if not file.name.endswith("_pb2.py")
    ]


def name_of(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


@cache
def nodes_of(file: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a file's syntax tree."""
    return tuple(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))


def imports_of(file: Path) -> Iterator[Import]:
    """Yield every import of a file, at any depth; relative ones resolved from the root."""
    package = file.relative_to(ROOT).parts[:-1]
    for node in nodes_of(file):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level:
            # One dot is the own package; `from .. import peer` names folders after `import`.
            base = package[: len(package) - node.level + 1]
            names = [node.module] if node.module else [alias.name for alias in node.names]
            targets = [".".join((*base, name)) for name in names]
        elif isinstance(node, ast.ImportFrom):
            targets = [node.module or ""]
        else:
            continue
        is_relative = isinstance(node, ast.ImportFrom) and node.level > 0
        for target in targets:
            yield Import(f"{name_of(file)}:{node.lineno}", target, is_relative)


def functions_of(file: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in nodes_of(file):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def requirement_names(requirements: list[str]) -> set[str]:
    """Return the import names that stand behind requirement lines."""
    names = {re.split(r"[^A-Za-z0-9_.-]", line, maxsplit=1)[0] for line in requirements}
    return {IMPORT_NAMES.get(name, name.replace("-", "_")) for name in names}


def run_python(code: str) -> str:
    """Run code in a fresh interpreter that starts in the repository; return what it printed."""
    process = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_imports_of_sources_follow_the_arrows() -> None:
    wrong = [
        f"{found.where} imports {found.target}"
        for folder, allowed in ARROWS.items()
        for file in source_files(folder)
        for found in imports_of(file)
        if found.is_relative and found.top not in allowed
    ]

    assert not wrong


def test_imports_inside_the_project_are_relative() -> None:
    wrong = [
        f"{found.where} imports {found.target}"
        for file in source_files()
        for found in imports_of(file)
        if not found.is_relative and found.top in {"shoal", *ARROWS}
    ]

    assert not wrong


def test_imports_of_tests_and_scripts_name_the_installed_package() -> None:
    wrong = [
        f"{found.where} imports {found.target}"
        for folder in ("tests", "examples", "benchmarks")
        for file in source_files(folder)
        for found in imports_of(file)
        if found.is_relative or found.top in ARROWS
    ]

    assert not wrong


def test_protocol_modules_are_pure() -> None:
    wrong = [
        f"{found.where} imports {found.target}: {thing}"
        for file in source_files("protocol")
        if file.relative_to(ROOT).parts[1] != "net"
        for found in imports_of(file)
        for thing, modules in {**IMPURE_MODULES, "what does I/O": {"protocol.net"}}.items()
        if modules & {found.top, ".".join(found.target.split(".")[:2])}
    ]

    assert not wrong


@pytest.mark.parametrize("dependency", DOORS)
def test_dependency_has_one_door(dependency: str) -> None:
    doors = DOORS[dependency]
    wrong = [
        found.where
        for file in source_files()
        for found in imports_of(file)
        if found.top == dependency
        and not any(
            name_of(file).startswith(door) if door.endswith("/") else name_of(file) == door
            for door in doors
        )
    ]

    assert not wrong, f"{dependency} is imported only in {', '.join(sorted(doors))}"


def test_every_imported_distribution_is_declared() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    optional = [*extras["cuda"], *extras["datasets"]]
    declared = requirement_names([*PROJECT["project"]["dependencies"], *optional])
    known = declared | set(sys.stdlib_module_names)
    wrong = [
        f"{found.where} imports {found.target}"
        for file in source_files()
        for found in imports_of(file)
        if not found.is_relative and found.top not in known
    ]

    assert not wrong


def test_every_source_folder_is_packaged_under_shoal() -> None:
    setuptools = PROJECT["tool"]["setuptools"]
    on_disk = {
        "shoal." + ".".join(file.parent.relative_to(ROOT).parts)
        for folder in ARROWS
        for file in (ROOT / folder).rglob("*.py")
    }

    assert set(setuptools["packages"]) == on_disk
    assert setuptools["package-dir"] == {f"shoal.{folder}": folder for folder in ARROWS}
    assert list((ROOT / "models").glob(setuptools["package-data"]["shoal.models"][0]))


def test_benchmarks_stay_out_of_the_product_and_its_wheel() -> None:
    setuptools = PROJECT["tool"]["setuptools"]
    installed = {word for package in setuptools["packages"] for word in package.split(".")}
    imports = [
        f"{found.where} imports {found.target}"
        for file in source_files()
        for found in imports_of(file)
        if found.top in {"benchmarks", *BENCHMARKS}
    ]

    assert {"measuring", "simulation", "swarm_benchmarks"} <= BENCHMARKS
    assert not installed & {"benchmarks", *BENCHMARKS}
    assert not imports


def test_benchmarks_are_packages_whose_names_hide_no_other() -> None:
    # Their folder is on the import path while they run; a file `kernels.py` in it would be taken
    # for the Hub's package `kernels`.
    files = (ROOT / "benchmarks").rglob("*.py")
    code = (
        "from importlib.util import find_spec\n"
        f"print(*(name for name in {sorted(BENCHMARKS)!r} if find_spec(name)))\n"
    )

    assert {file.relative_to(ROOT).parts[1] for file in files} == BENCHMARKS
    assert run_python(code).split() == []


def test_every_file_of_the_native_kernels_is_in_the_source_distribution() -> None:
    # setuptools packs what an extension names, and nothing else in its folder.
    named = {
        name
        for extension in PROJECT["tool"]["setuptools"]["ext-modules"]
        for name in (*extension["sources"], *extension["depends"])
    }

    assert named == {name_of(file) for file in (ROOT / "kernels" / "native").glob("*.[ch]")}
    # Without a compiler the installation goes on.
    assert all(extension["optional"] for extension in PROJECT["tool"]["setuptools"]["ext-modules"])


def test_every_folder_is_a_typed_package_and_kernels_has_no_init() -> None:
    folders = {file.parent for file in source_files()}
    without_init = {name_of(folder) for folder in folders if not (folder / "__init__.py").exists()}
    without_marker = {folder for folder in ARROWS if not (ROOT / folder / "py.typed").exists()}

    # With an __init__.py, kernels/ would hide the Hub's package `kernels` from transformers.
    assert without_init == {"kernels"}
    assert not without_marker


def test_nothing_of_ours_is_installed_under_a_bare_name() -> None:
    code = (
        "from importlib.util import find_spec\n"
        f"for name in {sorted(ARROWS)!r}:\n"
        "    spec = find_spec(name)\n"
        "    print(*(spec.submodule_search_locations or [spec.origin]) if spec else [])\n"
    )
    places = [Path(line).resolve() for line in run_python(code).splitlines() if line]

    assert not [place for place in places if place.is_relative_to(ROOT)]


def test_no_file_puts_the_repository_root_on_the_import_path_of_tests() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py"))
    assert not (ROOT / "conftest.py").exists()


@pytest.mark.slow
def test_importing_the_client_loads_no_peer_and_no_network_stack() -> None:
    # Whoever only imports the client does not wait for the directory, which is imported when a
    # swarm is joined.
    heavy = ("hivemind", "bitsandbytes", "grpc", "uvloop", "shoal.peer", "shoal.cli")
    code = (
        "import shoal.client, sys\n"
        "assert shoal.client.__file__, 'client/__init__.py is missing'\n"
        f"print(*(name for name in {heavy!r} if name in sys.modules), sep='\\n')\n"
    )

    assert run_python(code).split() == []


def import_graph() -> dict[str, set[str]]:
    """Return for each file the files of ours that it imports, in any way."""
    modules = {module_of(file): name_of(file) for file in source_files()}
    graph: dict[str, set[str]] = {name: set() for name in modules.values()}
    for file in source_files():
        package = module_of(file) if file.name == "__init__.py" else module_of(file.parent)
        for target in targets_of(file, package):
            found = next((modules[name] for name in prefixes_of(target) if name in modules), None)
            if found is not None and found != name_of(file):
                graph[name_of(file)].add(found)
    return graph


def module_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(("shoal", *(parts[:-1] if parts[-1] == "__init__" else parts)))


def prefixes_of(target: str) -> Iterator[str]:
    """Yield a dotted name, then its package, and so on upwards."""
    while target:
        yield target
        target = target.rpartition(".")[0]


def targets_of(file: Path, package: str) -> Iterator[str]:
    """Yield what a file imports of ours, as dotted names down to the imported name."""
    for node in nodes_of(file):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = resolve_name("." * node.level + (node.module or ""), package)
            yield from (f"{base}.{alias.name}" for alias in node.names)


def find_circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the groups of nodes that reach each other (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    circles: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(graph[node]):
            if target not in index:
                visit(target)
            if target in stack:
                low[node] = min(low[node], low[target])
        if low[node] == index[node]:
            start = stack.index(node)
            if len(stack) - start > 1:
                circles.append(sorted(stack[start:]))
            del stack[start:]

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return circles


def rooms_of(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Return for each room the other rooms that its files import."""
    rooms: dict[str, set[str]] = {}
    for name, targets in graph.items():
        room = name.rpartition("/")[0]
        arrows = {target.rpartition("/")[0] for target in targets}
        rooms.setdefault(room, set()).update(arrows - {room})
    return rooms


def test_no_files_import_each_other() -> None:
    assert not find_circles(import_graph())


def test_no_rooms_import_each_other() -> None:
    assert not find_circles(rooms_of(import_graph()))


def test_files_import_few_others() -> None:
    graph = import_graph()
    graph.pop(COMMAND_TABLE)
    wide = {name: len(targets) for name, targets in graph.items() if len(targets) > MAX_IMPORTS}

    assert not wide


def test_command_table_imports_commands_alone() -> None:
    graph = import_graph()

    assert not [name for name in graph[COMMAND_TABLE] if not name.startswith("cli/")]
    assert [name for name in graph if COMMAND_TABLE in graph[name]] == ["cli/main.py"]


def test_nothing_of_ours_is_imported_by_name() -> None:
    wrong = [
        f"{name_of(file)}:{node.lineno}"
        for file in source_files()
        for node in nodes_of(file)
        if isinstance(node, ast.Call)
        and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module"
        and name_of(file) not in LAZY_NAMES
        and str(getattr(node.args[0], "value", ".")).startswith(".")
    ]

    assert not wrong


def test_no_chain_of_imports_is_long() -> None:
    graph = {**import_graph(), COMMAND_TABLE: set[str]()}

    @cache
    def find_chain(name: str) -> list[str]:
        return [name, *max((find_chain(target) for target in graph[name]), key=len, default=[])]

    longest = max((find_chain(name) for name in graph), key=len)

    assert len(longest) - 1 <= MAX_FLOORS, " -> ".join(longest)


def test_rooms_have_a_few_files_and_say_what_they_hold() -> None:
    wrong: list[str] = []
    for room in rooms_of(import_graph()):
        files = [file for file in source_files(room) if file.parent == ROOT / room]
        is_room = "/" in room and room != "kernels/native"  # whose other files are C
        if is_room and len(files) - 1 not in ROOM_FILES:
            wrong.append(f"{room} has {len(files) - 1} files")
        if (ROOT / room / "__init__.py").exists():
            text = (ROOT / room / "__init__.py").read_text(encoding="utf-8")
            first = re.search(r"[Rr]ead\s+first:\s+`?([\w/.]+\.py)", text)
            if first is None or not (ROOT / room / first[1]).exists():
                wrong.append(f"{room}/__init__.py names no file to read first")

    assert not wrong


def test_files_and_functions_stay_within_their_budgets() -> None:
    wrong: list[str] = []
    for file in source_files():
        num_lines = len(file.read_text(encoding="utf-8").splitlines())
        if num_lines > MAX_FILE_LINES:
            wrong.append(f"{name_of(file)} has {num_lines} lines, more than {MAX_FILE_LINES}")
        for function in functions_of(file):
            where = f"{name_of(file)}:{function.lineno} {function.name}"
            num_lines = (function.end_lineno or function.lineno) - function.lineno + 1
            arguments = function.args
            num_parameters = len(
                [*arguments.posonlyargs, *arguments.args[1:], *arguments.kwonlyargs]
            )
            if num_lines > MAX_FUNCTION_LINES:
                wrong.append(f"{where} has {num_lines} lines, more than {MAX_FUNCTION_LINES}")
            if function.name == "__init__" and num_parameters > MAX_CONSTRUCTOR_PARAMETERS:
                wrong.append(f"{where} has {num_parameters} parameters")

    assert not wrong


def test_tests_replace_no_private_name() -> None:
    wrong: list[str] = []
    for file in sorted((ROOT / "tests").rglob("*.py")):
        for node in nodes_of(file):
            names: list[str] = []
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "setattr":
                names = [str(getattr(one, "value", "")) for one in node.args[:2]]
            elif isinstance(node, ast.Assign):
                names = [
                    one.attr
                    for one in node.targets
                    if isinstance(one, ast.Attribute) and getattr(one.value, "id", "") != "self"
                ]
            wrong += [
                f"{name_of(file)} replaces {name}"
                for name in names
                if re.search(r"(^|\.)_[a-z]\w*$", name, re.IGNORECASE)
                and name.rpartition(".")[2] not in NAMES_OF_OTHERS
            ]

    assert not wrong


def test_tests_override_no_private_method() -> None:
    known = {one.name: one for file in source_files() for one in classes_of(file)}
    for part in sorted((ROOT / "tests" / "parts").rglob("*.py")):
        known |= {one.name: one for one in classes_of(part)}
    wrong: list[str] = []
    for file in sorted((ROOT / "tests").rglob("*.py")):
        own = {one.name: one for one in classes_of(file)}
        for one in own.values():
            wrong += [
                f"{name_of(file)} overrides {base.name}.{name}"
                for base in bases_of(one, {**known, **own})
                if base.name not in own
                for name in private_methods_of(one) & private_methods_of(base)
            ]

    assert not wrong


def test_no_two_parts_of_tests_define_a_class_of_the_same_name() -> None:
    wrong: list[str] = []
    files_of: dict[str, Path] = {}
    for file in sorted((ROOT / "tests" / "parts").rglob("*.py")):
        for name in re.findall(r"^class (\w+)", file.read_text(encoding="utf-8"), re.MULTILINE):
            if files_of.setdefault(name, file) != file:
                wrong.append(f"{name} is in {name_of(files_of[name])} and in {name_of(file)}")

    assert not wrong


def classes_of(file: Path) -> list[ast.ClassDef]:
    return [node for node in nodes_of(file) if isinstance(node, ast.ClassDef)]


def bases_of(found: ast.ClassDef, known: Mapping[str, ast.ClassDef]) -> Iterator[ast.ClassDef]:
    """Yield the classes that one derives from, as far as they are known by name."""
    for written in found.bases:
        base = known.get(getattr(written, "attr", getattr(written, "id", "")))
        if base is not None and base is not found:
            yield base
            yield from bases_of(base, known)


def private_methods_of(found: ast.ClassDef) -> set[str]:
    methods = (one for one in found.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))
    return {one.name for one in methods if re.match("_[a-z]", one.name)}


def test_every_room_has_tests_of_its_own() -> None:
    rooms = {name_of(file.parent) for file in source_files()}
    tested = {
        name_of(file.parent).partition("/")[2] for file in (ROOT / "tests").rglob("test_*.py")
    }

    assert rooms - tested == UNTESTED_ROOMS


def test_no_module_is_named_like_a_drawer() -> None:
    assert not [name_of(file) for file in source_files() if file.stem in DRAWER_NAMES]


def test_no_two_files_define_a_class_of_the_same_name() -> None:
    files_of: dict[str, list[str]] = {}
    for file in source_files():
        for name in re.findall(r"^class (\w+)", file.read_text(encoding="utf-8"), re.MULTILINE):
            files_of.setdefault(name, []).append(name_of(file))

    assert not {name: files for name, files in files_of.items() if len(files) > 1}
