"""A process that ends with the one that it works for.

A process that was forked holds the connections of its parent open. As long as one is left, no one notices that the
parent was killed: not the other ranks, and not Ray.
"""

from __future__ import annotations

import gc
import os
import select
import threading


def end_with_parent() -> None:
    """End this process as soon as its parent is gone. Does nothing where the system cannot tell (Linux can)."""
    gc.freeze()  # what was garbage in the parent may have threads that do not exist here
    try:
        handle = os.pidfd_open(os.getppid())  # type: ignore[attr-defined, unused-ignore]
    except (AttributeError, OSError):
        return

    def wait() -> None:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        while not poll.poll():
            pass
        os._exit(1)

    threading.Thread(target=wait, name="raysgd-parent", daemon=True).start()
