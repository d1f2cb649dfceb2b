"""A real server that speaks the language of Google's store, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

from tests.s3_server import BUCKET, free_port, wait_until_it_listens


@dataclass
class GcsServer:
    """A running server with an empty bucket in its memory."""

    port: int
    process: subprocess.Popen[bytes]

    @classmethod
    def started(cls) -> GcsServer:
        """Starts one."""
        port = free_port()
        options = ["--host=127.0.0.1", f"--port={port}", "--in-memory", f"--default-bucket={BUCKET}"]
        command = [sys.executable, "-m", "gcp_storage_emulator", "start", *options]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_until_it_listens(port, process)
        return cls(port, process)

    def uri(self, path: str) -> str:
        """The address of something in the bucket."""
        return f"gs://anonymous@{BUCKET}/{path}?scheme=http&endpoint_override=127.0.0.1:{self.port}"

    def kill(self) -> None:
        """Ends it."""
        self.process.kill()
        self.process.wait()
