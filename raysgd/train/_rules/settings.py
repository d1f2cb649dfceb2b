"""Settings of front ends for the workers of functions: what each of them wants otherwise, and checks of arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from raysgd._arguments import MAX_WORKERS, check_num_workers
from raysgd.engine.policies import Diagnosis, FailurePolicy
from raysgd.engine.shared.group_spec import FrontEndWords
from raysgd.train._rules.arrivals import CheckpointTaker
from raysgd.train._rules.max_retries import RETRY_ADVICE, restarts_allowed
from raysgd.train.backend import BackendConfig

WORDS = FrontEndWords(
    when_shut_down="Call `start` again for new workers.",
    name="the function `Trainer`",
    when_interrupted="Checkpoints that the functions saved are kept.",
    when_starved="Ask for fewer workers or less per worker, or free what is held. Saved checkpoints are kept.",
    when_spent="Saved checkpoints are kept: to continue, pass `latest_checkpoint` to the next run as `checkpoint`.",
    when_not_granted=(
        "Ask for fewer workers or less per worker, free what is held, add nodes, or wait longer by setting the "
        "environment variable TRAIN_PLACEMENT_GROUP_TIMEOUT_S."
    ),
    after_end="saved checkpoints are kept",
    restart_point="from the newest checkpoint, or from the beginning without one",
)
"""What users of functions are told behind the engine's facts."""


@dataclass(frozen=True)
class ExecutorRules:
    """The rules of a front end that wants something otherwise than `Trainer` does.

    Attributes:
        failures: Decides what follows a failure; None for what the environment says.
        checkpoints: Takes the checkpoints; None for a `CheckpointManager`.
        on_failure: Called when the function is about to start again because of a failure.
        words: What users are told behind the facts of the engine.
        retry_advice: What the last loss that is allowed says about the number of retries.
        num_ahead: How many reports may wait for the driver while functions go on; None leaves that to the environment.
        is_elastic: Whether functions go on where they are when other workers are lost.
        num_spares: How many workers wait, ready, to step in for lost ones.
    """

    failures: FailurePolicy | None = None
    checkpoints: CheckpointTaker | None = None
    on_failure: Callable[[Diagnosis], None] = lambda diagnosis: None
    words: FrontEndWords = WORDS
    retry_advice: str = RETRY_ADVICE
    num_ahead: int | None = None
    is_elastic: bool = False
    num_spares: int = 0


def as_range(num_workers: int | tuple[int, int]) -> tuple[int, int]:
    """The smallest and the largest number of workers.

    Raises:
        ValueError: Neither a positive integer nor a pair of such, the smaller one first.
    """
    pair = (num_workers, num_workers) if isinstance(num_workers, int) else num_workers
    if (
        isinstance(num_workers, bool)
        or not isinstance(pair, tuple)
        or len(pair) != 2
        or not all(isinstance(number, int) for number in pair)
        or not 1 <= pair[0] <= pair[1] <= MAX_WORKERS
    ):
        raise ValueError(
            f"`num_workers={num_workers!r}`: need at least 1 and at most {MAX_WORKERS}, or a pair such as `(2, 8)`, "
            "the smallest and the largest number."
        )
    return pair


def check_spares(num_spares: Any, is_elastic: bool) -> None:
    """Checks the number of workers that wait to step in.

    Raises:
        ValueError: It cannot be, or there is nowhere to step in.
    """
    check_num_workers("spare_workers", num_spares, hint="They wait to step in for lost ones.", least=0)
    if num_spares and not is_elastic:
        raise ValueError(
            f"`spare_workers={num_spares}` without `elastic=True`: they step in where functions go on after a loss. "
            "Pass both, or neither."
        )


def check_elastic(config: BackendConfig, num_workers: tuple[int, int], num_gpus: float, max_retries: int) -> None:
    """Checks that functions can go on where they are.

    Args:
        config: Connects the workers.
        num_workers: The smallest and the largest number of workers.
        num_gpus: GPUs for each.
        max_retries: As for `LossCounter`.

    Raises:
        ValueError: They cannot, with these arguments.
    """
    least, most = num_workers
    if least == most:
        raise ValueError(
            f"`elastic=True` and `num_workers={most}`: after a loss, fewer workers continue, so pass the "
            f"least and the most, such as `num_workers=({max(1, most - 1)}, {most})`."
        )
    if not config.can_regroup(num_gpus):
        raise ValueError(
            f"`elastic=True` with `{config!r}`: only workers that `TorchConfig` connects with gloo can form a new "
            'group while a function runs. Pass `TorchConfig(backend="gloo")`, or leave `elastic` out.'
        )
    if not restarts_allowed(max_retries):
        raise ValueError(
            "`elastic=True` where the first loss ends the run: allow more, with `max_retries` of at least 2 in "
            "`Trainer`, with `FailureConfig(max_failures=...)` of at least 1 in `fit`, or -1 for any number."
        )
