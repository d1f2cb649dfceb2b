"""Class-based distributed training for TensorFlow, with Keras 3 or tf_keras.

This package guarantees:

* An optimizer step of N workers equals a single-process step on the global batch, even if the shards are uneven.
* `train()` and `validate()` return the same results with any number of workers.
* If a worker dies, at most the work of the current call is lost, and usually only one step. In the worst case, the call
  is repeated from the state before the call.

You define the model, the loss and the data. Importing this package does not load TensorFlow.
"""

from __future__ import annotations

from raysgd.core.imports import lazy_names

lazy_names(__name__)
