"""A real server that speaks S3, in a process of its own, which tests may freeze and kill."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass

BUCKET = "bucket"
_START_S = 60.0
KEYS = ("an-id", "a-secret")


@dataclass
class S3Server:
    """A running server. Its addresses have all that a client needs, so that workers can use them too."""

    port: int
    process: subprocess.Popen[bytes]

    @classmethod
    def started(cls) -> S3Server:
        """Starts one with an empty bucket."""
        port = free_port()
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        server = cls(port, process)
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
        self.process.kill()
        self.process.wait()

    def _make_bucket(self) -> None:
        import boto3
        from botocore.config import Config

        wait_until_it_listens(self.port, self.process)
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


def wait_until_it_listens(port: int, process: subprocess.Popen[bytes]) -> None:
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


def free_port() -> int:
    """A port that no one listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
