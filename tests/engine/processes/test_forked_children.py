"""Tests of what forked processes keep of a worker."""

from __future__ import annotations

import subprocess
import sys
import tempfile

PROGRAM = """
import os, socket, sys
from raysgd.engine.processes.forked_children import let_go_of_ray

ends = []
for name in ("raylet", "other"):
    place = os.path.join(sys.argv[1], name)
    server = socket.socket(socket.AF_UNIX)
    server.bind(place)
    server.listen()
    client = socket.socket(socket.AF_UNIX)
    client.connect(place)
    ends.append((server.accept()[0], client))
let_go_of_ray()
forked_and_ready, ready = os.pipe()
ends_with_this, open_until_then = os.pipe()
if not os.fork():
    os.close(open_until_then)
    os.write(ready, b"1")
    os.read(ends_with_this, 1)
    os._exit(0)
os.read(forked_and_ready, 1)
for taken, client in ends:
    client.close()
    taken.settimeout(0.2)
    try:
        print("ended" if taken.recv(1) == b"" else "?")
    except TimeoutError:
        print("open")
"""


def test_a_forked_process_keeps_no_connection_to_ray_and_all_others() -> None:
    with tempfile.TemporaryDirectory() as folder:  # names of sockets have to be short
        done = subprocess.run([sys.executable, "-c", PROGRAM, folder], capture_output=True, text=True)
    assert (done.stdout.split(), done.stderr) == (["ended", "open"], "")
