"""What users of functions read when something goes wrong: advice that holds for functions."""

from __future__ import annotations

import pytest

from raysgd.exceptions import TrainerShutdownError, WorkersLostError
from raysgd.train._workers import WORDS
from tests.core.engine import trainer as simulated


def started() -> simulated.Trainer:
    """What is below a function trainer, over simulated workers."""
    return simulated.Trainer(spec={"words": WORDS}).started()


def test_a_loss_too_many_names_the_checkpoint() -> None:
    with pytest.raises(WorkersLostError) as caught:
        started().walk(5, simulated.dies(1), max_retries=0)
    assert "to continue, pass `latest_checkpoint` to the next run as `checkpoint`" in str(caught.value)
    assert "shutdown(force=True)" not in str(caught.value)


def test_a_shutdown_while_a_function_runs_says_what_is_kept() -> None:
    made = started()
    with pytest.raises(TrainerShutdownError, match=r"Checkpoints that the functions saved are kept\."):
        made.walk(5, simulated.befalls(made.stop, 0))
