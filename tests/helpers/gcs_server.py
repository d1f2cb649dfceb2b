"""A real server that speaks the language of Google's store, in a process of its own."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

from tests.helpers.s3_server import BUCKET, end_program, start_program, told_port

# As `gcp_storage_emulator start` does it, but at a port that is free for certain, which it tells.
_PROGRAM = f"""
import signal
from gcp_storage_emulator.server import create_server

server = create_server("127.0.0.1", 0, in_memory=True, default_bucket={BUCKET!r})
server.start()
print(server._api._httpd.server_port, flush=True)
signal.pause()
"""


@dataclass
class GcsServer:
    """A running server with an empty bucket in its memory."""

    port: int
    process: subprocess.Popen[str]

    @classmethod
    def started(cls) -> GcsServer:
        """Starts one."""
        process = start_program(_PROGRAM)
        return cls(told_port(process), process)

    def uri(self, path: str) -> str:
        """The address of something in the bucket."""
        return f"gs://anonymous@{BUCKET}/{path}?scheme=http&endpoint_override=127.0.0.1:{self.port}"

    def kill(self) -> None:
        """Ends it."""
        end_program(self.process)
