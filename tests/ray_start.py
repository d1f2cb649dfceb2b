"""How long Ray may take to start: it gives its processes 30 seconds, which a busy machine may exceed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

PATIENCE_S = 240.0
VARIABLES = {
    "RAY_gcs_server_port_wait_time_s": f"{PATIENCE_S:.0f}",
    "RAY_worker_register_timeout_seconds": f"{PATIENCE_S:.0f}",
}
"""The same for what is in a variable of the environment."""


@contextmanager
def patient_ray() -> Iterator[None]:
    """Nodes that start in the block are waited for as long as a test may take."""
    from ray._private import services

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

    with mock.patch.object(services, "get_node", wait_for_node):
        yield
