"""Callbacks: what is done beside a training, in the driver (`Callback`) and in the workers (`WorkerCallback`).

What it guarantees:

* The same callback works in `trainer.fit`, in `Trainer.run` and in `RunConfig(callbacks=...)`.
* A callback that raises is named, the run ends cleanly, and the state of the training is kept.
* Importing this package loads no framework.

What it leaves to others: when callbacks are called (`raysgd.replicas.fitting`, `raysgd.train`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raysgd._lazy import lazy_names

if TYPE_CHECKING:
    from raysgd.callbacks.callback import Callback, Run
    from raysgd.callbacks.worker_callback import WorkerCallback

__all__ = ["Callback", "Run", "WorkerCallback"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Callback": "raysgd.callbacks.callback",
        "Run": "raysgd.callbacks.callback",
        "WorkerCallback": "raysgd.callbacks.worker_callback",
    },
)
