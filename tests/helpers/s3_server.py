"""A real server that speaks S3, in a process of its own, which tests may freeze and kill."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import dataclass

BUCKET = "bucket"
KEYS = ("an-id", "a-secret")

# As `moto.server` does it, but at a port that is free for certain, which it tells.
_PROGRAM = """
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server

application = DomainDispatcherApplication(create_backend_app)
application.debug = True
server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=MotoRequestHandler)
print(server.server_port, flush=True)
server.serve_forever()
"""


@dataclass
class S3Server:
    """A running server. Its addresses have all that a client needs, so that workers can use them too."""

    port: int
    process: subprocess.Popen[str]

    @classmethod
    def started(cls) -> S3Server:
        """Starts one with an empty bucket."""
        process = start_program(_PROGRAM)
        server = cls(told_port(process), process)
        server._make_bucket()
        return server

    def uri(self, path: str) -> str:
        """The address of something in the bucket."""
        options = f"scheme=http&endpoint_override=127.0.0.1:{self.port}&region=us-east-1"
        return f"s3://{':'.join(KEYS)}@{BUCKET}/{path}?{options}"

    def freeze(self) -> None:
        """Lets it answer nothing any more."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Lets it go on."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Ends it."""
        end_program(self.process)

    def _make_bucket(self) -> None:
        import boto3
        from botocore.config import Config

        client = boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{self.port}",
            aws_access_key_id=KEYS[0],
            aws_secret_access_key=KEYS[1],
            region_name="us-east-1",
            config=Config(proxies={}),
        )
        client.create_bucket(Bucket=BUCKET)
        client.close()


def start_program(program: str) -> subprocess.Popen[str]:
    """Starts a server that prints its port as soon as it listens."""
    command = [sys.executable, "-c", program]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def told_port(process: subprocess.Popen[str]) -> int:
    """Where the server listens; waits until it does."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        end_program(process)
        raise RuntimeError("the server of the store did not start")
    return int(line)


def end_program(process: subprocess.Popen[str]) -> None:
    """Ends a server."""
    with process:
        process.kill()
