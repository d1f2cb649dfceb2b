"""What passes between a front end and its replicas for one epoch."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from raysgd.core.numbers.meters import MetricSummary
from raysgd.trainer.messages.epochs import EpochAnswer, accepted, bind_batch_info, merged


def test_results_are_merged_by_name_or_listed_as_they_are() -> None:
    answers = [
        EpochAnswer(MetricSummary({"loss": loss, "num_samples": n}), None, 1) for loss, n in ((1.0, 1), (4.0, 2))
    ]
    assert merged(answers, True) == {"num_samples": 3, "loss": 3.0}
    assert merged(answers, False) == [{"loss": 1.0, "num_samples": 1}, {"loss": 4.0, "num_samples": 2}]


def test_something_else_than_metrics_is_listed_but_not_merged() -> None:
    answers = [EpochAnswer(None, [1], 1)]
    assert merged(answers, False) == [[1]]
    with pytest.raises(TypeError, match=r"returned a `list`.*reduce_results=False"):
        merged(answers, True)


class Signatures:
    """Overrides of `train_epoch` that are found in the wild; each returns what it was given."""

    def baseline(self, iterator, info=None, num_steps=None, epoch_idx=0):  # type: ignore[no-untyped-def]
        return iterator, info, num_steps, epoch_idx

    def older(self, iterator, info):  # type: ignore[no-untyped-def]
        return iterator, info

    def other_name(self, batches, information):  # type: ignore[no-untyped-def]
        return batches, information

    def other_name_with_default(self, batches, information=None):  # type: ignore[no-untyped-def]
        return batches, information

    def any_keyword(self, iterator, **kwargs):  # type: ignore[no-untyped-def]
        return iterator, kwargs

    def info_and_any_keyword(self, iterator, info, **kwargs):  # type: ignore[no-untyped-def]
        return iterator, info, kwargs

    def other_name_and_any_keyword(self, iterator, information, **kwargs):  # type: ignore[no-untyped-def]
        return iterator, information, kwargs

    def anything(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        return args, kwargs

    def iterator_and_any_arguments(self, iterator, *args):  # type: ignore[no-untyped-def]
        return iterator, args

    def keyword_only(self, iterator, *, info):  # type: ignore[no-untyped-def]
        return iterator, info

    def positional_only(self, iterator, info, /):  # type: ignore[no-untyped-def]
        return iterator, info

    def iterator_only(self, iterator):  # type: ignore[no-untyped-def]
        return iterator

    def new_names_only(self, iterator, epoch_idx, num_steps):  # type: ignore[no-untyped-def]
        return iterator, epoch_idx, num_steps

    def with_an_option_of_its_own(self, iterator, info, temperature=0.5):  # type: ignore[no-untyped-def]
        return iterator, info, temperature


REST = {"num_steps": 4, "epoch_idx": 2}
ALL = {"info": {"a": 1}, **REST}


def called(method: Any, info: dict[str, Any]) -> Any:
    args, named = accepted(method, "it", info=info, **REST)
    return method(*args, **named)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("baseline", ("it", {"a": 1}, 4, 2)),
        ("older", ("it", {"a": 1})),
        ("other_name", ("it", {"a": 1})),
        ("other_name_with_default", ("it", {"a": 1})),
        ("any_keyword", ("it", ALL)),
        ("info_and_any_keyword", ("it", {"a": 1}, REST)),
        ("other_name_and_any_keyword", ("it", {"a": 1}, REST)),
        ("anything", (("it",), ALL)),
        ("iterator_and_any_arguments", ("it", ({"a": 1},))),
        ("keyword_only", ("it", {"a": 1})),
        ("positional_only", ("it", {"a": 1})),
        ("iterator_only", "it"),
        ("new_names_only", ("it", 2, 4)),
        ("with_an_option_of_its_own", ("it", {"a": 1}, 0.5)),
    ],
)
def test_overrides_of_any_generation_get_what_they_accept(name: str, expected: Any) -> None:
    assert called(getattr(Signatures(), name), {"a": 1}) == expected


def test_a_decorated_override_is_judged_by_its_own_signature() -> None:
    def logged(method: Any) -> Any:
        @functools.wraps(method)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return method(*args, **kwargs)

        return wrapper

    class Decorated:
        @logged
        def train_epoch(self, iterator, info):  # type: ignore[no-untyped-def]
            return iterator, info

    assert called(Decorated().train_epoch, {}) == ("it", {})


class Overrides:
    """`train_batch` as people write it; each returns what it was given beside the batch."""

    def stock(self, batch: Any, batch_info: Any) -> Any:
        return batch_info

    def keyword_only(self, batch: Any, *, batch_info: Any) -> Any:
        return batch_info

    def renamed(self, batch: Any, info: Any) -> Any:
        return info

    def optional(self, batch: Any, batch_info: Any = None) -> Any:
        return batch_info

    def anything(self, *args: Any, **kwargs: Any) -> Any:
        return args[1] if len(args) > 1 else kwargs["batch_info"]

    def any_keywords(self, batch: Any, **kwargs: Any) -> Any:
        return kwargs["batch_info"]

    def positions(self, *args: Any) -> Any:
        return args[1]

    def index(self, batch: Any, batch_idx: int) -> Any:
        return batch_idx

    def index_by_keyword(self, batch: Any, *, batch_idx: int) -> Any:
        return batch_idx

    def both(self, batch: Any, batch_idx: int, batch_info: Any) -> Any:
        return batch_idx, batch_info

    def nothing(self, batch: Any) -> Any:
        return None


INFO = {"batch_idx": 3, "global_step": 7}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *((name, INFO) for name in ("stock", "keyword_only", "renamed", "optional", "anything", "any_keywords")),
        ("positions", INFO),
        ("index", 3),
        ("index_by_keyword", 3),
        ("both", (3, INFO)),
        ("nothing", None),
    ],
)
def test_a_batch_method_gets_what_it_takes(name: str, expected: Any) -> None:
    assert bind_batch_info(getattr(Overrides(), name))("batch", INFO) == expected
