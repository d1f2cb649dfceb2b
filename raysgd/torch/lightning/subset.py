"""The subset of Lightning that a `LightningOperator` supports, in one table, and what it refuses.

Tests hold the table to Lightning: each of its hooks is in one of the rows, and those that are called come in its order.
`docs/lightning.md` shows the same to users.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from raysgd.torch.lightning.module import LightningHooks

logger = logging.getLogger(__name__)

CALLED = (
    *("prepare_data", "setup", "configure_model", "configure_optimizers", "on_fit_start"),
    *("train_dataloader", "val_dataloader", "on_train_start", "on_train_epoch_start"),
    *("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer", "on_train_batch_start"),
    *("optimizer_step", "training_step", "on_before_zero_grad", "optimizer_zero_grad"),
    *("on_before_backward", "backward", "on_after_backward"),
    *("on_before_optimizer_step", "configure_gradient_clipping", "lr_scheduler_step"),
    *("on_train_batch_end", "on_train_epoch_end"),
    *("on_validation_model_zero_grad", "on_validation_model_eval", "on_validation_start"),
    *("on_validation_epoch_start", "on_validation_batch_start", "validation_step", "on_validation_batch_end"),
    *("on_validation_epoch_end", "on_validation_end"),
    *("on_save_checkpoint", "on_load_checkpoint"),
)
"""Hooks and methods that are called as Lightning's own `Trainer` calls them in `fit`, in this order."""

NEVER_CALLED = {
    "on_train_end": "nothing tells that a training has ended: call what it does in your program",
    "on_fit_end": "nothing tells that a training has ended: call what it does in your program",
    "teardown": "nothing tells that a training has ended: call what it does in your program",
    "on_validation_model_train": "each part of the model is put back into its mode before the next training",
    "configure_callbacks": "Lightning's callbacks are not supported: use callbacks of `trainer.fit`",
    "configure_sharded_model": "use `configure_model`, and `TorchTrainer(strategy='fsdp')` to divide a model",
}
"""Hooks of a training that are not called, and what to do about it. A module that has one gets a warning."""

OTHER_STAGES = ("test_", "predict_", "on_test_", "on_predict_")
"""How hooks begin that belong to other stages than training and validation: only `predict_step` is ever called."""


def warn_of_what_is_not_called(hooks: LightningHooks, name: str) -> None:
    """Says in the log which hooks of a module have no effect.

    Args:
        hooks: Those of the module.
        name: What its class is called.
    """
    for hook, advice in NEVER_CALLED.items():
        if hooks.has(hook) and hooks.overrides(hook):
            logger.warning("`%s.%s` is never called: %s", name, hook, advice)


def check_optimizers(module: Any, optimizers: Sequence[Any]) -> None:
    """Refuses optimizers that would not train what the module says.

    Raises:
        ValueError: There are several and nothing says when each of them steps; or one computes gradients by itself.
    """
    name = type(module).__name__
    if len(optimizers) > 1 and module.automatic_optimization:
        raise ValueError(
            f"`{name}.configure_optimizers` returned {len(optimizers)} optimizers: set `self.automatic_optimization = "
            "False` in `__init__` and step each of them in `training_step` (`first, second = self.optimizers()`), or "
            "return one optimizer with several groups of parameters."
        )
    if any(isinstance(each, torch.optim.LBFGS) for each in optimizers):
        raise ValueError(
            f"`{name}.configure_optimizers` returned `LBFGS`, which computes gradients several times in a step: use "
            "another optimizer."
        )
