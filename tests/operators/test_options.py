from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from raysgd.operators import options
from raysgd.utils import BATCH_SIZE

NO_NUMBERS = [None, "0.1", True, math.nan, math.inf, -1, [0.1]]
NO_COUNTS = [None, "8", True, 0, -1, 2.0]


class TestNumber:
    @pytest.mark.parametrize("value", [0.1, 1, np.float32(0.5), np.int64(2)])
    def test_numbers_of_any_type_are_returned_as_floats(self, value: Any) -> None:
        found = options.number({"lr": value}, "lr", default=7.0, positive=True)
        assert (found, type(found)) == (float(value), float)

    def test_without_the_key_it_is_the_default(self) -> None:
        assert options.number({}, "lr", default=7.0, positive=True) == 7.0

    @pytest.mark.parametrize("value", NO_NUMBERS)
    def test_everything_else_is_refused_with_what_was_passed(self, value: Any) -> None:
        with pytest.raises(ValueError, match=r"`config\['lr'\]=.*`: need a positive number; without the key it is 0.5"):
            options.number({"lr": value}, "lr", default=0.5, positive=True)

    def test_zero_is_allowed_where_it_makes_sense(self) -> None:
        assert options.number({"decay": 0}, "decay", default=1.0, positive=False) == 0.0
        with pytest.raises(ValueError, match="need a positive number"):
            options.number({"decay": 0}, "decay", default=1.0, positive=True)


class TestCount:
    @pytest.mark.parametrize("value", [1, np.int64(1)])
    def test_integers_are_returned(self, value: Any) -> None:
        assert options.count({"noise_dim": value}, "noise_dim", default=7) == 1

    @pytest.mark.parametrize("value", NO_COUNTS)
    def test_everything_else_is_refused(self, value: Any) -> None:
        with pytest.raises(ValueError, match=r"`config\['noise_dim'\]=.*`: need an integer of at least 1"):
            options.count({"noise_dim": value}, "noise_dim", default=7)


class TestBatchSize:
    @pytest.mark.parametrize(
        ("config", "expected"), [({}, 32), ({"batch_size": 8}, 8), ({BATCH_SIZE: 4}, 4), ({"lr": 1.0}, 32)]
    )
    def test_stands_under_either_key(self, config: dict[str, Any], expected: int) -> None:
        assert options.batch_size(config) == expected

    def test_both_keys_at_once_are_refused(self) -> None:
        with pytest.raises(ValueError, match="both"):
            options.batch_size({BATCH_SIZE: 4, "batch_size": 4})

    @pytest.mark.parametrize("value", NO_COUNTS)
    def test_what_is_no_count_is_refused(self, value: Any) -> None:
        with pytest.raises(ValueError, match="batch_size"):
            options.batch_size({"batch_size": value})


class TestSeed:
    @pytest.mark.parametrize("value", [None, 0, np.int64(5), 2**63 - 1])
    def test_none_and_integers_are_returned(self, value: Any) -> None:
        assert options.seed({"seed": value}) == value

    @pytest.mark.parametrize("value", [True, -1, 1.5, "1", 2**63])
    def test_what_cannot_be_a_seed_is_refused(self, value: Any) -> None:
        with pytest.raises(ValueError, match=r"`config\['seed'\]="):
            options.seed({"seed": value})
