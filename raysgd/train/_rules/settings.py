"""Settings for the workers of an executor: its arguments, checked, and the environment of the driver."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from raysgd._arguments import MAX_WORKERS, MIN_HEARTBEAT_S, check_amount, check_num_workers, check_seconds
from raysgd.engine.policies import Diagnosis, FailurePolicy, ScalingPolicy
from raysgd.engine.shared.group_spec import FrontEndWords, GroupSpec
from raysgd.messages.placement import Placement
from raysgd.train import constants
from raysgd.train._rules.arrivals import CheckpointTaker
from raysgd.train._rules.max_retries import RETRY_ADVICE, restarts_allowed
from raysgd.train._worker.function_replica import FunctionReplicas
from raysgd.train.backend import Backend, BackendConfig, Connection, PlacedConnection

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


def _ignore(diagnosis: Diagnosis) -> None:
    """Does nothing about a failure."""


@dataclass(frozen=True)
class ExecutorRules:
    """The rules of a front end that wants something otherwise than `Trainer` does.

    Attributes:
        failures: Decides what follows a failure.
        checkpoints: Takes the checkpoints; None for a `CheckpointManager`.
        on_failure: Called when the function is about to start again because of a failure.
        words: What users are told behind the facts of the engine.
        retry_advice: What the last loss that is allowed says about the number of retries.
        num_ahead: How many reports may wait for the driver while functions go on; None leaves that to the environment.
        is_elastic: Whether functions go on where they are when other workers are lost.
        num_spares: How many workers wait, ready, to step in for lost ones.
    """

    failures: FailurePolicy = field(default_factory=FailurePolicy)
    checkpoints: CheckpointTaker | None = None
    on_failure: Callable[[Diagnosis], None] = _ignore
    words: FrontEndWords = WORDS
    retry_advice: str = RETRY_ADVICE
    num_ahead: int | None = None
    is_elastic: bool = False
    num_spares: int = 0


class WorkerSettings:
    """The settings for the workers of an executor: its arguments as users pass them, and the environment of the driver.

    Attributes:
        scaling: Decides the number of workers.
        resources: What one worker gets.
        heartbeat_s: A worker process that gives no sign of life for so long is lost.
        shares_gpus: Whether each worker sees the GPUs of all workers on its node.
        packs: Whether workers go to as few nodes as they can.
        reservation_timeout_s: How long to wait until the cluster grants the resources.
        is_detailed: Whether each report also says where and when it was made.
        num_ahead: How many reports may wait for the driver while functions go on.
        renews_retries: Whether a checkpoint that has landed starts the count of losses again.

    Raises:
        ValueError: A number that cannot be.
    """

    def __init__(
        self,
        backend: Backend,
        num_workers: int | tuple[int, int],
        num_cpus_per_worker: float,
        num_gpus_per_worker: float,
        additional_resources_per_worker: Mapping[str, float] | None,
        heartbeat_s: float,
        placement: Placement | None = None,
    ) -> None:
        min_workers, max_workers = as_range(num_workers)
        check_seconds("heartbeat_s", heartbeat_s, MIN_HEARTBEAT_S)
        check_amount("num_cpus_per_worker", num_cpus_per_worker)
        check_amount("num_gpus_per_worker", num_gpus_per_worker)
        read = constants.env_integer
        placement = placement or Placement()
        needs = placement.resources(num_cpus_per_worker, num_gpus_per_worker)
        self.scaling = ScalingPolicy(max_workers=max_workers, min_workers=min_workers)
        self.resources = replace(needs, custom={**(additional_resources_per_worker or {}), **needs.custom})
        self.heartbeat_s = heartbeat_s
        self.shares_gpus = bool(
            read(constants.ENABLE_SHARE_CUDA_VISIBLE_DEVICES_ENV, int(backend.share_cuda_visible_devices))
        )
        self.packs = placement.packs(by_default=not read(constants.TRAIN_ENABLE_WORKER_SPREAD_ENV, 0))
        self.reservation_timeout_s = read(constants.TRAIN_PLACEMENT_GROUP_TIMEOUT_S_ENV, 100)
        self.is_detailed = bool(read(constants.ENABLE_DETAILED_AUTOFILLED_METRICS_ENV, 0))
        self.num_ahead = max(0, read(constants.TRAIN_REPORTS_AHEAD_ENV, 0))
        self.renews_retries = bool(read(constants.TRAIN_RENEW_RETRIES_ENV, 0))

    def num_ahead_by(self, rules: ExecutorRules) -> int:
        """Return how many reports may wait, where a front end may have other rules for that."""
        return self.num_ahead if rules.num_ahead is None else rules.num_ahead

    def group_spec(
        self,
        config: BackendConfig,
        initialization_hook: Callable[[], Any] | None,
        rules: ExecutorRules | None = None,
        replicas: FunctionReplicas | None = None,
    ) -> GroupSpec:
        """Return what the engine starts every group from."""
        rules = rules or ExecutorRules()
        return GroupSpec(
            connection=self._connection(config),
            make_replica=replicas or FunctionReplicas(),
            resources=self.resources,
            initialization_hook=initialization_hook,
            reservation_timeout_s=self.reservation_timeout_s,
            captures=False,
            runs_on=rules.is_elastic,
            num_spares=rules.num_spares,
            packs=self.packs,
            heartbeat_s=self.heartbeat_s,
            words=rules.words,
        )

    def _connection(self, config: BackendConfig) -> Connection:
        connection = config.connection(self.resources.num_gpus)
        if isinstance(connection, PlacedConnection):
            connection.shares_gpus = self.shares_gpus
        elif self.shares_gpus and self.resources.num_gpus > 0:
            return PlacedConnection(connection, shares_gpus=True)
        return connection


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
