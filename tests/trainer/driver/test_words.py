"""What the two kinds of front ends tell their users behind the engine's facts."""

from __future__ import annotations

from dataclasses import fields

import pytest

from raysgd import TorchTrainer
from raysgd.core.engine.shared.interface import FrontEndWords
from raysgd.train import Trainer, _workers
from raysgd.train.executor import BackendExecutor
from raysgd.trainer.driver import life as class_based


@pytest.mark.parametrize("words", [class_based.WORDS, _workers.WORDS])
def test_each_front_end_has_words_for_everything(words: FrontEndWords) -> None:
    assert all(getattr(words, field.name) for field in fields(words) if field.name != "label")
    assert words.restart_point != FrontEndWords().restart_point


def test_advice_for_classes_names_what_their_trainers_have() -> None:
    assert hasattr(TorchTrainer, "save")
    assert "`save` before `shutdown`" in class_based.WORDS.when_shut_down
    assert "`shutdown(force=True)`" in class_based.WORDS.when_spent
    assert "last completed" in class_based.WORDS.after_end + class_based.WORDS.restart_point
    assert " SGD_PLACEMENT_GROUP_TIMEOUT_S" in class_based.WORDS.when_not_granted


def test_advice_for_functions_names_what_their_trainers_have() -> None:
    all_words = " ".join(getattr(_workers.WORDS, field.name) for field in fields(_workers.WORDS))
    assert "force=True" not in all_words
    assert "last completed" not in all_words
    assert "`save`" not in all_words
    assert all(hasattr(front_end, "latest_checkpoint") for front_end in (Trainer, BackendExecutor))
    assert "`latest_checkpoint`" in _workers.WORDS.when_spent
    assert " TRAIN_PLACEMENT_GROUP_TIMEOUT_S" in _workers.WORDS.when_not_granted
