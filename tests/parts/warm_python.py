"""Processes of Python that have nothing left to import.

A peer takes three seconds to import what it needs, a client five, and the tests start hundreds.
Here a process imports it once, and forks into whatever command it is asked for: a process group,
streams, an environment and an end of its own, and a child of whoever asks. What such a
process does is the same, only sooner; tests about how a process starts take a plain one.

    with Popen([sys.executable, "-P", "-m", "shoal.cli", "serve", ...], stdout=PIPE) as process:
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import inspect
import io
import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy
import torch

from shoal.peer.local_swarm.swarm import LocalPeer

_MODULES = (
    "shoal.cli.main",
    "shoal.cli.commands.serve",
    "shoal.cli.commands.generate",
    "shoal.cli.commands.doctor",
    "shoal.cli.commands.finetune",
    "shoal.cli.finetuning.loss_plot",
    "shoal.cli.monitoring.monitor",
    "matplotlib.backends.backend_agg",
    "importlib.resources.readers",
    "_strptime",
    "shoal.peer.operating.operation",
    "shoal.peer.peer",
    "shoal.cli.training.train",
    "shoal.peer.runs.run_peer",
    "shoal.client",
    "shoal.client.model.auto",
    # Who is not on the internet does without these, and everybody here is.
    "shoal.protocol.net.dht.hivemind_directory",
    "shoal.protocol.net.tcp.tcp_transport",
    "cryptography.hazmat.backends.openssl",
    "hivemind.utils.multiaddr.codecs.cid",
    "hivemind.utils.multiaddr.codecs.ip4",
    "hivemind.utils.multiaddr.codecs.uint16be",
    "shoal.client.trace.trace_summary",
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.tokenization_auto",
    "transformers.convert_slow_tokenizer",
    "transformers.integrations.mistral",
    "transformers.generation.utils",
)

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "OPENBLAS_NUM_THREADS": "1",  # numpy would start one for each core, and none survives a fork
    # The other way to ask whether there is a CUDA device spoils it for forked processes.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
"""What imports ask the environment for, beside what is there already."""

_NOT_SUPPORTED = ("preexec_fn", "pass_fds", "shell")

_START_PEERS = frozenset({"demo", "swarm"})
"""Subcommands that start peers of their own."""

_MAX_REQUEST_BYTES = 128 * 1024
_PR_SET_CHILD_SUBREAPER = 36
_CLONE_NEWNET = 0x40000000

_system = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class _Request:
    """What a process is to be."""

    command: Sequence[str]
    """What follows the name of the interpreter: `-P -m shoal.cli serve …`."""
    environment: dict[str, str]
    folder: str
    process_group: int
    """0 for one of its own."""
    has_session: bool = False
    """Whether it is in a session of its own."""
    starts_peers: bool = False
    """Whether it starts peers, which are to be forked as well."""
    network: str = ""
    """Name of the network that it is in, of those that `ip netns` knows."""


class _Forge:
    """The process that forks, seen from the one that asks it to. Ends with that one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self.pid = 0

    def start(self) -> None:
        """Start it, unless it runs; for who compares what there is before and after."""
        with self._lock:
            self._connect()

    def fork(self, request: _Request, streams: Sequence[int]) -> int:
        """Return the id of a new child of this process."""
        with self._lock:
            control = self._connect()
            # The new process is the orphan of one that is gone at once, and comes to us.
            with _taking_in_orphans():
                socket.send_fds(control, [json.dumps(asdict(request)).encode()], streams)
                return int(control.recv(64))

    def stop(self) -> None:
        """End it; what it started goes on."""
        with self._lock:
            if self._socket is not None:
                self._socket.close()
                os.waitpid(self.pid, 0)
                self._socket, self.pid = None, 0

    def use(self, control: socket.socket, pid: int) -> None:
        """Take one that runs, a child of this process."""
        self._socket, self.pid = control, pid

    def _connect(self) -> socket.socket:
        if self._socket is None:
            control, theirs = _make_pair()
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-P", __file__, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    process_group=0,
                    env={**os.environ, **SETTINGS},
                )
            assert control.recv(64) == b"ready", "it could not import everything"
            process.returncode = 0  # it is ours to wait for
            self.use(control, process.pid)
        assert self._socket is not None
        return self._socket


forge = _Forge()


class Popen(subprocess.Popen[Any]):
    """`subprocess.Popen` for commands of this interpreter, whose processes import nothing.

    Of a program that `starts_peers`, the peers import nothing either; subcommands are known to.
    """

    def __init__(self, *arguments: Any, starts_peers: bool = False, **options: Any) -> None:
        self._starts_peers = starts_peers
        super().__init__(*arguments, **options)

    def _execute_child(self, *arguments: Any) -> None:
        """Take the place of fork and exec; all that subprocess does around them stays."""
        names = inspect.signature(super()._execute_child).parameters  # type: ignore[misc]
        given = dict(zip(names, arguments, strict=True))
        assert not any(given[name] for name in _NOT_SUPPORTED)
        program, *command = given["args"]
        network = ""
        if program == "ip":  # netns exec NAME COMMAND
            _, _, network, program, *command = command
        assert program == sys.executable, f"{program} is not the Python that runs the tests"
        request = _Request(
            [os.fspath(word) for word in command],
            dict(os.environ if given["env"] is None else given["env"]),
            os.fspath(given["cwd"] or os.getcwd()),
            0 if given["process_group"] == 0 else os.getpgrp(),
            given["start_new_session"],
            self._starts_peers or not _START_PEERS.isdisjoint(command[:4]),
            network,
        )
        ends = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        try:
            streams = [own if end == -1 else end for own, end in enumerate(ends)]
            self.pid = forge.fork(request, streams)
            self._child_created = True
        finally:
            pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
            self._close_pipe_fds(*(given[name] for name in pipes))  # type: ignore[attr-defined]


def run(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[Any]:
    """Do as `subprocess.run` does."""
    timeout, text = options.pop("timeout", None), options.pop("input", None)
    if options.pop("capture_output", False):
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if text is not None:
        options["stdin"] = subprocess.PIPE
    with Popen(command, **options) as process:
        try:
            output, errors = process.communicate(text, timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


@contextlib.contextmanager
def _taking_in_orphans() -> Iterator[None]:
    """Inside, processes below this one that lose their parent become its children."""
    assert _system.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    try:
        yield
    finally:
        _system.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _make_pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _serve(control: socket.socket) -> _Request:
    """Fork whenever asked to. Returns in the new processes only, as what they are to be."""
    while True:
        request = fork_once(control)
        if request is not None:
            return request


def fork_once(control: socket.socket) -> _Request | None:
    """Fork when asked to. Returns in the new process what it is to be, and None in the old one.

    Ends this process instead when nobody can ask any more.
    """
    message, streams, _, _ = socket.recv_fds(control, _MAX_REQUEST_BYTES, 3)
    if not message:
        sys.exit(0)
    is_new, pid = _fork_an_orphan()
    if is_new:
        control.close()
        request = _Request(**json.loads(message))
        _take_over(request, streams)
        return request
    for stream in streams:
        os.close(stream)
    control.send(str(pid).encode())
    return None


def _fork_an_orphan() -> tuple[bool, int]:
    """Return whether this is the new process, and in the old one the id of the new one."""
    reader, writer = os.pipe()
    middle = os.fork()
    if middle == 0:
        pid = os.fork()
        os.close(reader)
        if pid:
            os.write(writer, str(pid).encode())
            os._exit(0)
        os.close(writer)
        return True, 0
    os.close(writer)
    pid = int(os.read(reader, 64))
    os.close(reader)
    os.waitpid(middle, 0)
    return False, pid


def _take_over(request: _Request, streams: Sequence[int]) -> None:
    """Give this process what was asked for, as exec would have found it."""
    if request.has_session:
        os.setsid()
    else:
        os.setpgid(0, request.process_group)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    if request.network:
        with open(f"/run/netns/{request.network}") as network:
            assert _system.setns(network.fileno(), _CLONE_NEWNET) == 0
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    folders = request.environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [folder for folder in folders if folder and folder not in sys.path]
    tempfile.tempdir = None  # somebody may have asked for it
    torch.seed()
    numpy.random.seed()
    sys.stdin = io.TextIOWrapper(io.BufferedReader(_open_stream(0, "stdin")))
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(_open_stream(1, "stdout")))
    error_writer = io.BufferedWriter(_open_stream(2, "stderr"))
    sys.stderr = io.TextIOWrapper(error_writer, errors="backslashreplace", line_buffering=True)
    if any(Path(folder, "sitecustomize.py").is_file() for folder in folders if folder):
        sys.modules.pop("sitecustomize", None)  # of an outer process
        importlib.import_module("sitecustomize")


def _open_stream(number: int, name: str) -> io.FileIO:
    stream: Any = io.FileIO(number, "r" if number == 0 else "w", closefd=False)
    stream.name = f"<{name}>"
    return stream


def _leave_a_forge(request: _Request) -> _Request:
    """Split into the process that was asked for, and one that forks the peers which it starts.

    Returns in the former, and in every peer, as what they are to be.
    """
    ours, theirs = _make_pair()
    pid = os.fork()
    if pid:
        theirs.close()
        forge.use(ours, pid)
        LocalPeer.Popen = Popen
        return request
    ours.close()
    os.setpgid(0, 0)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nowhere, number)
    os.close(nowhere)
    return _serve(theirs)


def _become(command: Sequence[str]) -> None:
    """Do as `python COMMAND` does."""
    option, *words = command
    is_safe = option == "-P"
    if is_safe or option == "-u":
        option, *words = words
    match option:
        case "-m":
            sys.argv = words
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        case "-c":
            sys.argv = ["-c", *words[1:]]
            exec(compile(words[0], "<string>", "exec"), {"__name__": "__main__"})
        case _:
            sys.argv = [option, *words]
            if not is_safe:
                sys.path.insert(0, str(Path(option).parent))
            runpy.run_path(option, run_name="__main__")


def _end(error: BaseException | None) -> NoReturn:
    """Do what matters of an interpreter's end; to take down every module takes half a second."""
    code = 0
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    elif error is not None:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    forge.stop()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def import_everything() -> None:
    """Import what the processes need that will be forked."""
    for name in _MODULES:
        importlib.import_module(name)
    runpy.run_path(os.path.join(os.path.dirname(__file__), "light_p2pd.py"))["use"]()
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose the other threads"
    gc.collect()
    gc.freeze()  # what is never collected is never written to, and stays shared


def be(request: _Request) -> NoReturn:
    """Be what was asked for, to its end."""
    if request.starts_peers:
        own = _leave_a_forge(request)
        if own is not request:
            be(own)
    try:
        _become(request.command)
    except BaseException as error:  # noqa: BLE001 - as the interpreter does
        _end(error)
    _end(None)


def main() -> None:
    sys.modules["warm_python"] = sys.modules["__main__"]  # for those who are forked
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    import_everything()
    control.send(b"ready")
    be(_serve(control))


if __name__ == "__main__":
    main()
