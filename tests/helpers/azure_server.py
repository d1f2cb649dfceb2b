"""A real server that speaks the language of Azure's store, in a process of its own: Azurite, a program of Node.js."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import time
from dataclasses import dataclass
from typing import Any

from tests.helpers.s3_server import BUCKET

_ACCOUNT, _KEY = "account", "YS1zZWNyZXQ="
_PROGRAM = "azurite-blob"
_START_S = 120.0


@dataclass
class AzureServer:
    """A running server with an empty container in its memory."""

    port: int
    process: subprocess.Popen[bytes]

    @staticmethod
    def missing() -> str:
        """What has to be installed before one can be started here; empty if nothing."""
        if importlib.util.find_spec("adlfs") is None:
            return "`adlfs` is not installed; run: pip install adlfs"
        return "" if shutil.which(_PROGRAM) else f"`{_PROGRAM}` is not installed; run: npm install --global azurite"

    @classmethod
    def started(cls) -> AzureServer:
        """Starts one."""
        port = _free_port()
        options = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--inMemoryPersistence", "--skipApiVersionCheck"]
        process = subprocess.Popen(
            [_PROGRAM, *options, "--disableTelemetry"],
            env={**os.environ, "AZURITE_ACCOUNTS": f"{_ACCOUNT}:{_KEY}"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        _wait_until_it_listens(port, process)
        server = cls(port, process)
        server.filesystem().mkdir(BUCKET)
        return server

    @property
    def connection_string(self) -> str:
        """What `AZURE_STORAGE_CONNECTION_STRING` says for it."""
        place = f"http://127.0.0.1:{self.port}/{_ACCOUNT}"
        return f"DefaultEndpointsProtocol=http;AccountName={_ACCOUNT};AccountKey={_KEY};BlobEndpoint={place};"

    def filesystem(self) -> Any:
        """What has the container."""
        from adlfs import AzureBlobFileSystem

        return AzureBlobFileSystem(connection_string=self.connection_string)

    def kill(self) -> None:
        """Ends it."""
        self.process.kill()
        self.process.wait()


def _wait_until_it_listens(port: int, process: subprocess.Popen[bytes]) -> None:
    """Returns when a server accepts connections; ends it if it does not."""
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.05)
    process.kill()
    process.wait()
    raise RuntimeError("the server of the store did not start")


def _free_port() -> int:
    """A port that no one listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
