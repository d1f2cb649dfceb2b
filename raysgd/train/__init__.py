"""Function-based distributed training: raysgd starts and connects the workers, and your function does the training.

Guarantees:

* The function runs once in each worker, connected to the other workers. The workers' reports arrive together, step by
  step, in rank order.
* Saving a checkpoint costs the function one copy of its state. The copy is sent and written while training continues,
  and a checkpoint file is always complete.
* If a worker dies, only the work since the last checkpoint is lost: the function restarts from that checkpoint, on as
  many workers as are available.

The function itself is responsible for the training loop, the data, and the decision when to save a checkpoint.
"""

from __future__ import annotations

from raysgd.core.imports import lazy_names

lazy_names(__name__)
