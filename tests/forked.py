"""Workers of Ray that are forked from a process that has imported PyTorch: they start in a fraction of the time.

Ray starts its workers with the interpreter that `sys.executable` names when a cluster starts. `forking_interpreter` is
one that asks this module, running as a server, to fork a worker; it executes everything else as ever. The server imports
neither raysgd nor Ray, whose connections do not survive a fork. A worker is a process like any other: with a group, an
environment and seeds of its own. With `RAYSGD_FORKED_WORKERS=0`, as in `make soak`, Ray starts its workers itself.
"""

from __future__ import annotations

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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SWITCH = "RAYSGD_FORKED_WORKERS"
PRELOADED = ("torch", "psutil", "yaml", "jsonschema", "google.protobuf.descriptor_pb2")

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


@contextmanager
def forking_interpreter() -> Iterator[str]:
    """Yields what `sys.executable` has to be while a cluster starts whose workers are forked."""
    if os.environ.get(SWITCH) == "0":
        yield sys.executable
        return
    with tempfile.TemporaryDirectory(prefix="f-") as folder:
        address, interpreter = f"{folder}/server", Path(folder, "python")
        interpreter.write_text(_INTERPRETER.format(python=sys.executable, address=address), encoding="utf-8")
        interpreter.chmod(0o755)
        # In a session of its own, out of reach of Ctrl-C. It ends when its input does.
        with subprocess.Popen(
            [sys.executable, __file__, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        ) as server:
            assert server.stdout is not None
            assert server.stdout.readline(), "the server that forks workers did not start"
            yield str(interpreter)


def serve(address: str) -> None:
    """Forks for whoever connects, until the input ends."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen(64)
        print("listening", flush=True)  # who connects before all is imported, waits
        for name in PRELOADED:
            __import__(name)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that a worker that ended is gone
        while sys.stdin not in select.select([sys.stdin, server], [], [])[0]:
            connection, _ = server.accept()
            with connection:
                order, descriptors = _received(connection)
                is_worker = os.fork() == 0
            if is_worker:
                server.close()
                become(descriptors, **order)
                return
            for descriptor in descriptors:
                os.close(descriptor)


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
