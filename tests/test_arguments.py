"""What trainers check alike: the words of an error, and which numbers are taken."""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from raysgd import _arguments as checks


def test_nothing_unknown_is_nothing_to_refuse() -> None:
    checks.refuse_unknown("Trainer", {}, ["num_workers"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("num_worker", r"`Trainer` does not know `num_worker`\. Did you mean `num_workers`\?"),
        ("xyz", r"`Trainer` does not know `xyz`\.$"),
        (
            "split_batches",
            r"omit it, or pass it to `raysgd.torch.TorchTrainer` or `raysgd.tf.TFTrainer`, with an operator",
        ),
        ("deterministic", r"omit it, or pass it to `raysgd.torch.TorchTrainer`, with an operator\.$"),
    ],
)
def test_what_is_unknown_is_guessed_at_or_sent_to_where_it_is_known(name: str, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        checks.refuse_unknown("Trainer", [name], ["num_workers", "backend"])


@pytest.mark.parametrize("value", [np.int64(3), np.uint8(3), 3])
def test_counts_become_those_of_python(value: Any) -> None:
    assert type(checks.check_count("n", value, "")) is int
    assert checks.check_num_steps(value) == 3
    assert checks.check_num_workers("n", value, "") == 3


@pytest.mark.parametrize(("value", "is_one"), [(1.5, True), (np.float32(2), True), (True, False), (math.inf, False)])
def test_what_a_number_is(value: Any, is_one: bool) -> None:
    assert checks.is_number(value) is is_one


def test_a_time_may_be_its_least_unless_that_is_excluded() -> None:
    assert checks.check_seconds("t", 0) == 0
    with pytest.raises(ValueError, match="`t=0`: need a number of seconds, more than 0"):
        checks.check_seconds("t", 0, may_be_least=False)


class Options(dict[str, Any]):
    """Has its entries as attributes, as an `AttrDict` has."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def test_a_config_is_copied_as_what_it_is() -> None:
    given = Options(lr=0.1)
    copied: Any = checks.with_entries(checks.check_config(given), {"depth": 2})
    assert (copied.lr, copied.depth, given) == (0.1, 2, {"lr": 0.1})
    assert type(checks.check_config(MappingProxyType(given))) is dict
