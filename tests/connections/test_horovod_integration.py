"""What the build of Horovod was mended for: a start that fails must not end the process."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration

# Past our own meeting point, which sees to it that nearly always all ranks are there, Horovod looks for a second rank.
PROGRAM = """
import threading

from raysgd.connections.horovod import HorovodConnection, import_horovod
from raysgd.engine.shared.types import Rendezvous, World


def start(connection, size):
    port = connection.open_endpoint("127.0.0.1", 0)
    connection.join(Rendezvous((("127.0.0.1", port),), True), World(0, size, 0, size))


class Hasty(HorovodConnection):
    def _wait_for_all(self, client, world):
        return 0, 1


class Interrupted(Hasty):
    def _wait_for_all(self, client, world):
        threading.Timer(0.3, self.interrupt).start()
        return super()._wait_for_all(client, world)


def fail(connection):
    try:
        start(connection, 2)
    except RuntimeError as error:
        assert connection.is_connection_error(error), error
        connection.leave()
        print("failed:", error)


fail(Hasty(timeout_s=1))
fail(Interrupted(timeout_s=1000))
last = HorovodConnection()
start(last, 1)
print("size:", import_horovod().size())
last.leave()
"""


def test_a_start_that_fails_or_is_interrupted_can_be_tried_again() -> None:
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    *failures, size = result.stdout.splitlines()
    assert [line.startswith("failed: Horovod could not connect 2 ranks") for line in failures] == [True, True]
    assert size == "size: 1"
