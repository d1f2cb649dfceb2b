"""Callbacks: objects whose methods are called during training, in the driver (`Callback`) or in the workers.

Callbacks in the workers derive from `WorkerCallback`. This package guarantees:

* The same `Callback` works in `trainer.fit`, in `Trainer.run` and in `RunConfig(callbacks=...)`.
* If a callback raises an error, the user gets an error that names the callback. The run ends cleanly, and the training
  state is not lost.
* Importing this package imports neither PyTorch nor TensorFlow.

Other modules decide when callbacks are called: `raysgd.trainer.driver.fit_loop` and `raysgd.train`.
"""

from __future__ import annotations

from raysgd.core.imports import lazy_names

lazy_names(__name__)
