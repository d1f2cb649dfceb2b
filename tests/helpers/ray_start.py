"""How Ray starts in tests: with few processes, for which it waits longer than 30 seconds, and with a token."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

PATIENCE_S = 240.0
VARIABLES = {
    "RAY_AUTH_TOKEN": secrets.token_hex(32),  # else several clusters that start at once may overwrite each other's file
    "RAY_gcs_server_port_wait_time_s": f"{PATIENCE_S:.0f}",
    "RAY_worker_register_timeout_seconds": f"{PATIENCE_S:.0f}",
}
"""For the environment of all test processes, and of those that they start."""
UNDER_TIMEOUT = {"RAY_gcs_server_port_wait_time_s": "30"}
"""For a program whose Ray may get a signal while it starts. Ray waits for its first process also where the signal has
ended it, and answers no signal meanwhile; this is as long as it waits for users."""


@contextmanager
def patient_ray() -> Iterator[None]:
    """Nodes that start in the block are waited for as long as a test may take, and leave out what no test asks.

    The server of the dashboard, the autoscaler and what reads log files take more than half of the CPU time of a start.
    """
    from ray._private import services
    from ray._private.node import Node

    get_node = services.get_node

    def wait_for_node(*args: Any) -> Any:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return get_node(*args)
            except RuntimeError:  # the node is not known yet
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.1)

    def leave_out(node: Node, **options: Any) -> None:
        node._webui_url = ""

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(services, "get_node", wait_for_node))
        for name in ("start_api_server", "start_monitor", "start_log_monitor"):
            stack.enter_context(mock.patch.object(Node, name, leave_out))
        yield
