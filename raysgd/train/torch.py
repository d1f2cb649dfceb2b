"""PyTorch in training functions: the process group, and helpers for models, loaders, optimizers and mixed precision.

Call the helpers inside a function that a trainer runs. They prepare your objects for the worker's device, the run's
precision, and training on several workers.
"""

from __future__ import annotations

from raysgd.core.imports import lazy_names, require_installed

require_installed("torch", extra="torch", purpose="`raysgd.train.torch`")
lazy_names(__name__)
