"""Ray workers that fork from a process that has imported the frameworks: they start in a fraction of the time.

Ray starts its workers with the interpreter that `sys.executable` names when the cluster starts. `forks` gives it one
that asks this module, which runs as a server, to fork a worker, and that executes everything else as usual. The server
imports neither raysgd nor Ray, whose connections do not survive a fork, nor Keras, whose version a test chooses. A
worker is a process like any other, with a process group, environment and seeds of its own. Set
`RAYSGD_FORKED_WORKERS=0`, as `make soak` does, to let Ray start its workers itself.
"""

from __future__ import annotations

import compileall
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any
from unittest import mock

SWITCH = "RAYSGD_FORKED_WORKERS"
LENT = "RAYSGD_FORKED_BY"
"""The interpreter that the process which started this one lends it."""
FOR_RAY = ("psutil", "yaml", "jsonschema", "requests", "msgpack", "filelock", "google.protobuf.descriptor_pb2")
FOR_TORCH = ("torch", "tqdm")
FOR_KERAS = ("h5py", "IPython", "matplotlib.pyplot", "optree", "pandas", "rich.console", "scipy.stats", "sklearn.base")
FOR_TENSORFLOW = ("tensorflow", *FOR_KERAS)

# It runs without `site` and with the standard library alone, to be quick.
_INTERPRETER = """#!{python} -IS
import os, sys

arguments = sys.argv[1:]
if not arguments[0].endswith("default_worker.py"):
    os.execv({python!r}, [{python!r}, *arguments])

import json, signal, socket

order = {{
    "arguments": arguments,
    "environment": dict(os.environ),
    "folder": os.getcwd(),
    "niceness": os.nice(0),
    "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
}}
data = json.dumps(order).encode()
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    socket.send_fds(server, [len(data).to_bytes(8, "big")], [0, 1, 2])
    server.sendall(data)
    server.recv(1)  # returns once the server has forked
"""


class Forks:
    """What forks the workers.

    Args:
        server: It runs this module.
        interpreter: What `sys.executable` has to be while a cluster starts.
    """

    def __init__(self, server: subprocess.Popen[str], interpreter: Path) -> None:
        self.server = server
        self.interpreter = interpreter

    def preload(self, names: Sequence[str]) -> None:
        """Lets the server import modules; whoever asks for a worker meanwhile waits."""
        assert self.server.stdin is not None
        self.server.stdin.write(" ".join(names) + "\n")
        self.server.stdin.flush()

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Clusters and nodes that start in the block have forked workers."""
        with mock.patch.object(sys, "executable", str(self.interpreter)):
            yield


class NoForks:
    """Leaves it to Ray to start workers."""

    def preload(self, names: Sequence[str]) -> None: ...

    @contextmanager
    def starting(self) -> Iterator[None]:
        yield


class LentForks(NoForks):
    """Lets the server of the process that started this one fork the workers.

    Args:
        interpreter: As in `Forks`.
    """

    def __init__(self, interpreter: str) -> None:
        self.interpreter = interpreter

    @contextmanager
    def starting(self) -> Iterator[None]:
        with mock.patch.object(sys, "executable", self.interpreter):
            yield


_LIBRARY = Path(__file__).parents[2] / "raysgd"
_running: list[Forks] = []


def to_lend() -> dict[str, str]:
    """Variables for a process that starts workers too, so that it need not start a server."""
    return {LENT: str(_running[-1].interpreter)} if _running else {}


def lent_forks() -> NoForks:
    """What forks the workers, if the process that started this one lends it."""
    return LentForks(os.environ[LENT]) if LENT in os.environ else NoForks()


@contextmanager
def forks(preloaded: Sequence[str] = FOR_TORCH) -> Iterator[Forks | NoForks]:
    """Until the end of the block workers can be forked."""
    if os.environ.get(SWITCH) == "0":
        yield NoForks()
        return
    if LENT in os.environ:
        yield lent_forks()
        return
    # Where PYTHONDONTWRITEBYTECODE is set, each worker would compile all modules again, which takes it a second.
    for folder in (_LIBRARY, _LIBRARY / "operators"):  # `operators` is a link, which `compileall` does not follow
        compileall.compile_dir(folder, quiet=2)
    with tempfile.TemporaryDirectory(prefix="f-") as folder:
        address, interpreter = f"{folder}/server", Path(folder, "python")
        interpreter.write_text(_INTERPRETER.format(python=sys.executable, address=address), encoding="utf-8")
        interpreter.chmod(0o755)
        command = [sys.executable, __file__, address]
        pipe = subprocess.PIPE
        # In a session of its own, out of reach of Ctrl-C. It ends when its input does.
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True) as server:
            assert server.stdout is not None
            assert server.stdout.readline(), "the server that forks workers did not start"
            found = Forks(server, interpreter)
            found.preload([*FOR_RAY, *preloaded])
            _running.append(found)
            try:
                yield found
            finally:
                _running.remove(found)
                server.kill()  # a process that a test has forked may still hold the other end of its input


def serve(address: str) -> None:
    """Forks for whoever connects, and imports what the input names, until that ends."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen(64)
        print("listening", flush=True)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that a worker that ended is gone
        while True:
            ready, _, _ = select.select([0, server], [], [])
            if 0 in ready:  # before any worker: what it needs is to be imported
                names = os.read(0, 10_000).decode()
                if not names:
                    return
                _import_all(names.split())
            elif _is_worker_forked_for(server):
                return


def _import_all(names: Sequence[str]) -> None:
    with _without_keras():
        for name in names:
            with suppress(ImportError):  # what only `make test-all` has; workers do without it, too
                importlib.import_module(name)


@contextmanager
def _without_keras() -> Iterator[None]:
    """Lets nobody import Keras: TensorFlow does without until somebody asks for `tf.keras`."""
    sys.meta_path.insert(0, _NoKeras)
    yield
    sys.meta_path.remove(_NoKeras)


class _NoKeras(PathFinder):
    """Finds the packages, but does not load them."""

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname in ("keras", "tf_keras") else None
        if spec is not None:
            spec.loader = cls  # type: ignore[assignment]
        return spec

    @staticmethod
    def create_module(spec: ModuleSpec) -> None: ...

    @staticmethod
    def exec_module(module: Any) -> None:
        raise ImportError(f"{module.__name__} is not for the server that forks workers")


def _is_worker_forked_for(server: socket.socket) -> bool:
    """In the server whether it forked is no news: False; in the worker, when that has ended: True."""
    connection, _ = server.accept()
    with connection:
        order, descriptors = _received(connection)
        is_worker = os.fork() == 0
    if is_worker:
        server.close()
        become(descriptors, **order)
        return True
    for descriptor in descriptors:
        os.close(descriptor)
    return False


def _received(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    head, descriptors, *_ = socket.recv_fds(connection, 8, 3)
    size, data = int.from_bytes(head, "big"), b""
    while len(data) < size:
        data += connection.recv(size - len(data))
    return json.loads(data), descriptors


def become(
    descriptors: list[int],
    arguments: list[str],
    environment: dict[str, str],
    folder: str,
    niceness: int,
    blocked: list[int],
) -> None:
    """Is from now on the program that Ray wanted to start."""
    os.setpgid(0, 0)  # Ray ends the whole group of a process
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    os.nice(niceness - os.nice(0))
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    _draw_new_seeds()
    sys.argv[:] = arguments
    sys.path[:1] = [os.path.dirname(arguments[0]), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    runpy.run_path(arguments[0], run_name="__main__")


def _draw_new_seeds() -> None:
    import numpy as np

    random.seed()
    np.random.seed()


if __name__ == "__main__":
    serve(sys.argv[1])
