"""What `StepOptions` holds: refused when it is made, by the name of the option."""

from __future__ import annotations

from typing import Any

import numpy
import pytest

from raysgd.torch.parallel.options import StepOptions


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *[
            ({"accumulate_grad_batches": value}, f"`accumulate_grad_batches={value}`: need an integer of at least 1")
            for value in (0, -1, 1.5, True)
        ],
        *[
            ({name: value}, f"`{name}={value!r}`: need a positive number")
            for name in ("clip_grad_norm", "clip_grad_value")
            for value in (-1.0, 0, True, "1", float("inf"), float("nan"))
        ],
        *[({name: 1}, f"`{name}=1`") for name in ("sync_batchnorm", "activation_checkpointing", "compile")],
    ],
)
def test_a_value_is_refused_by_the_name_of_the_option(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StepOptions(**options)


def test_options_for_the_compiler_stay_as_they_were_passed() -> None:
    given = {"backend": "eager"}
    options = StepOptions(compile=given, accumulate_grad_batches=numpy.int64(2))  # type: ignore[arg-type]
    given["backend"] = "inductor"
    assert options.compile == {"backend": "eager"}
    assert type(options.accumulate_grad_batches) is int
