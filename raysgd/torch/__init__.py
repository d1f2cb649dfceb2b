"""Class-based distributed training for PyTorch.

What it guarantees:

* `train()` and `validate()` report, on any number of workers, the numbers that one process over the same samples would.
* One optimizer step of N workers is the step of one process on the joined batch, also where the shares are uneven.
* A worker that dies costs at most the call in progress; the call is run again from the state before it.

What it leaves to others: the model, the loss and the data are the user's; collectives are `torch.distributed`'s.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from raysgd._optional import require

require("torch", extra="torch", purpose="`raysgd.torch`")

if TYPE_CHECKING:
    from raysgd.torch.torch_trainer import TorchTrainer
    from raysgd.torch.training_operator import CreatorOperator, TrainingOperator

__all__ = ["CreatorOperator", "TorchTrainer", "TrainingOperator"]

_LAZY_MODULES = {
    "TorchTrainer": "raysgd.torch.torch_trainer",
    "TrainingOperator": "raysgd.torch.training_operator",
    "CreatorOperator": "raysgd.torch.training_operator",
}


def __getattr__(name: str) -> Any:
    """Import the module behind a public name on first use: a worker needs the operator, not the trainer."""
    if name not in _LAZY_MODULES:
        raise AttributeError(f"module `{__name__}` has no attribute `{name}`")
    value = getattr(importlib.import_module(_LAZY_MODULES[name]), name)
    globals()[name] = value
    return value
