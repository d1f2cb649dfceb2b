"""The operators that tests of users derive from theirs."""

from __future__ import annotations

import pytest

from raysgd.torch.training_operator import get_test_metrics_operator, get_test_operator
from tests.torch.operators_for_tests import (
    LinearOperator,
    dataset_batches,
    make,
)


def test_a_test_operator_calls_the_function_of_its_config() -> None:
    operator_cls = get_test_operator(LinearOperator)
    assert make(operator_cls).train_epoch([1], {}, num_steps=2) == {"done": 1}
    custom = make(operator_cls, {"custom_func": lambda self, iterator, info: {"n": len(list(iterator)), **info}})
    assert custom.train_epoch([1, 2], {"a": 1}) == {"n": 2, "a": 1}
    assert custom.validate([1, 2, 3], {"a": 2}) == {"n": 3, "a": 2}


def test_a_test_metrics_operator_reports_its_scores() -> None:
    operator_cls = get_test_metrics_operator(LinearOperator)
    scores, val_scores = [4, 0, 0], [2, 2, 2]
    operator = make(operator_cls, {"key": "score", "scores": scores, "val_scores": val_scores})
    trained = operator.train_epoch(dataset_batches())
    assert (trained["score"], trained["last_score"], trained["num_samples"]) == (pytest.approx(4 / 6), 0, 6)
    validated = operator.validate(dataset_batches())
    assert (validated["score"], validated["last_score"]) == (1, 1)
    assert (scores, val_scores) == ([4, 0, 0], [2, 2, 2]), "the config stays as it is"
