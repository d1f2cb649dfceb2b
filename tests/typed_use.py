"""What type checkers say of a program of a user. `make typecheck` reads this file; nothing runs it.

The models that `get_model` returns have no type: PyTorch declares every attribute of a `Module` as a tensor or a
module, so calls of methods that users define on their own models would be refused.
"""

from __future__ import annotations

from typing import Any

from typing_extensions import assert_type

from raysgd import TFTrainer, TorchTrainer
from raysgd._numbers.results import Metrics
from raysgd.history.history import History


def of_torch(trainer: TorchTrainer) -> None:
    """Calls of `TorchTrainer`."""
    assert_type(trainer.train(), Metrics)
    assert_type(trainer.train(10, reduce_results=True).num_samples, float)
    assert_type(trainer.train()["train_loss"], Any)
    assert_type(trainer.validate(dataset=[]), Metrics)
    assert_type(trainer.test([]), Metrics)
    assert_type(trainer.fit(3), History)
    assert_type(trainer.train(reduce_results=False), Any)
    trainer.get_model().my_own_method()
    print(trainer.train().num_sample)  # type: ignore[attr-defined]


def of_tensorflow(trainer: TFTrainer) -> None:
    """Calls of `TFTrainer`."""
    assert_type(trainer.train(), Metrics)
    assert_type(trainer.validate().batch_count, float)
    assert_type(trainer.fit(3), History)
