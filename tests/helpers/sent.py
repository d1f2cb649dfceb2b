"""What the driver sends when a real trainer loads a file."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from raysgd.core.engine import group
from raysgd.core.engine.platform import Platform
from tests.helpers.doors import controller_of


def sent_by_load(trainer: Any, path: Path, times: int) -> tuple[int, int]:
    """What loading a file takes in which the random states of all workers are so many times, as of many more workers.

    Returns:
        The size of the largest message to a single worker, and the bytes of what is stored for all of them.
    """
    pack, store = group.pack, Platform.store
    messages: list[int] = []
    stored: list[int] = []

    def packed(*args: Any) -> Any:
        found = pack(*args)
        messages.append(len(found[0]))
        return found

    def counted(value: Any) -> Any:
        stored.append(len(pickle.dumps(value, protocol=5)))
        return store(value)

    controller = controller_of(trainer)
    snapshot = controller.snapshot()
    controller.snapshots.adopt(replace(snapshot, rank_states=snapshot.rank_states * times))
    trainer.save(path)
    controller.snapshots.adopt(snapshot)
    with patch.object(group, "pack", packed), patch.object(Platform, "store", staticmethod(counted)):
        trainer.load(path)
    return max(messages), sum(stored)
