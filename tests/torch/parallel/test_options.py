"""What `StepOptions` holds: refused when it is made, by the name of the option."""

from __future__ import annotations

import numpy

from raysgd.torch.parallel.options import StepOptions


def test_options_for_the_compiler_stay_as_they_were_passed() -> None:
    given = {"backend": "eager"}
    options = StepOptions(compile=given, accumulate_grad_batches=numpy.int64(2))  # type: ignore[arg-type]
    given["backend"] = "inductor"
    assert options.compile == {"backend": "eager"}
    assert type(options.accumulate_grad_batches) is int
