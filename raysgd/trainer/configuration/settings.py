"""Settings that both `TorchTrainer` and `TFTrainer` accept. They are checked once, when they are created.

Each trainer adds its own options in a subclass of `ReplicaSettings`. The fields of these classes are the table of all
options: name, default, check, and where the option holds. `chosen` fills them with the arguments of a trainer. A new
option requires changes in three places: the trainer's signature and docstring, a field with its check here or in the
subclass, and the code that uses the option.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from typing import Any, TypeVar

from raysgd.callbacks.worker_callback import WorkerCallback
from raysgd.core import arguments as checks
from raysgd.core.config_keys import BATCH_SIZE
from raysgd.core.engine.shared.types import World
from raysgd.exceptions import InvalidCountError
from raysgd.trainer.configuration.batch_options import BatchOptions
from raysgd.trainer.configuration.placement import Placement
from raysgd.trainer.configuration.recovery import Recovery

SettingsT = TypeVar("SettingsT", bound="ReplicaSettings")
OptionsT = TypeVar("OptionsT")

STREAMS_NEED = (
    "a stream, whose `batch(size)` is always the global batch of all workers: pass `split_batches=True` to the "
    "trainer, and not `add_dist_sampler=False`."
)


def chosen(options_cls: type[OptionsT], arguments: Mapping[str, Any], **values: Any) -> OptionsT:
    """Create an object that holds options of a trainer, and check the options.

    Args:
        options_cls: A dataclass, whose fields are options.
        arguments: The arguments of the trainer. Those that are no fields are ignored.
        **values: Fields that are not arguments, or differ from them.
    """
    names = [each.name for each in fields(options_cls) if each.name in arguments]  # type: ignore[arg-type]
    return options_cls(**{**{name: arguments[name] for name in names}, **values})


@dataclass(frozen=True, kw_only=True)
class GroupSettings:
    """Settings of a trainer for the number of workers, their resources, and how to handle failures.

    The docstrings of `TorchTrainer` and `TFTrainer` explain each field.

    Raises:
        ValueError, TypeError: A value is invalid.
        InvalidCountError: A count is out of range.
    """

    num_workers: int
    backend: str
    timeout_s: float
    num_cpus_per_worker: float = 1
    num_gpus_per_worker: float = 1
    placement: Placement = field(default_factory=Placement)
    initialization_hook: Callable[[], Any] | None = None
    use_local: bool = False
    recovery: Recovery = field(default_factory=Recovery)
    min_workers: int = 1
    spare_workers: int = 0

    def __post_init__(self) -> None:
        checks.refuse_text(use_local=self.use_local)
        checks.check_hook(self.initialization_hook)
        checks.check_amount("num_cpus_per_worker", self.num_cpus_per_worker)
        checks.check_kind("recovery", self.recovery, Recovery)
        self._check_counts()
        checks.check_seconds("timeout_s", self.timeout_s, may_be_least=False)

    def _check_counts(self) -> None:
        checks.check_num_workers(
            "min_workers", self.min_workers, hint="It is the number of workers to wait for after a failure."
        )
        if self.min_workers > self.num_workers:
            raise InvalidCountError(
                f"`min_workers={self.min_workers}` with `num_workers={self.num_workers}`: it cannot exceed "
                "`num_workers`. Lower one or raise the other."
            )
        checks.check_num_workers(
            "spare_workers", self.spare_workers, hint="They validate, and step in for lost ones.", least=0
        )

    @property
    def is_driver_only(self) -> bool:
        """True if the driver is the only worker."""
        return self.use_local and self.num_workers == 1

    def refuse_spares(self, obstacles: Iterable[tuple[bool, str]], way_out: str) -> None:
        """Raise an error if the user requested spare workers that could not replace lost workers.

        Args:
            obstacles: Reasons why spare workers cannot replace lost ones. Each is a tuple of a flag (True if the reason
                applies) and the argument that is the reason.
            way_out: Arguments that work with spare workers, for the error message.

        Raises:
            ValueError: The user requested spare workers, and a reason applies.
        """
        own = ((self.is_driver_only, "`use_local=True`"), (not self.recovery.in_place, "`Recovery(in_place=False)`"))
        for applies, what in (*own, *obstacles):
            if self.spare_workers and applies:
                raise ValueError(
                    f"`spare_workers={self.spare_workers}` with {what} cannot work: no spare can replace a lost "
                    f"worker. Use {way_out}, or no spares."
                )


@dataclass(frozen=True)
class ReplicaSettings:
    """The settings with which every worker creates its training operator. Each trainer adds fields in a subclass.

    Attributes:
        training_operator_cls: The user's operator class.
        config: The trainer's config. Its `BATCH_SIZE` is the batch size of all workers together.
        use_gpu: True if each worker has GPUs.
        recovery: How to handle failures.
        batch_options: The size of the global batch, and how it is split among workers.
        revision: How many times `reload` or `reset_config` has made the workers create new operators.
        config_changes: For each call to `update_config` since the operators were created, a dict with the previous
            values of the changed entries.
        worker_callbacks: The user's callbacks that run in the workers.
        callbacks_revision: How many times the worker callbacks were replaced.

    Raises:
        ValueError: A value is invalid.
    """

    training_operator_cls: type[Any]
    config: Mapping[str, Any]
    _: KW_ONLY
    use_gpu: bool = False
    recovery: Recovery = field(default_factory=Recovery)
    batch_options: BatchOptions = field(default_factory=BatchOptions)
    revision: int = 0
    config_changes: tuple[Mapping[str, Any], ...] = ()
    worker_callbacks: tuple[WorkerCallback, ...] = ()
    callbacks_revision: int = 0

    def after(self: SettingsT, num_changes: int) -> SettingsT:
        """Return these settings as they were after the first `num_changes` calls to `update_config`.

        With 0, the result has the config with which the operators were created.
        """
        if num_changes >= len(self.config_changes):
            return self
        config = checks.with_entries(self.config)
        for before in reversed(self.config_changes[num_changes:]):
            config.update(before)
        return replace(self, config=config, config_changes=self.config_changes[:num_changes])

    def follow(self, others: ReplicaSettings) -> bool:
        """Return True if an existing operator only needs changes of its config to match these settings.

        Args:
            others: The older settings with which the operator was created.
        """
        return self.revision == others.revision and len(self.config_changes) >= len(others.config_changes)

    def config_for(self, num_workers: int) -> dict[str, Any]:
        """Return the config for the operator of one worker if there are `num_workers` workers."""
        return self.batch_options.config_for(self.config, num_workers)

    @property
    def keeps_global_batch(self) -> bool:
        """True if the size of the global batch does not depend on the number of workers."""
        return self.batch_options.is_global or BATCH_SIZE in self.config

    @property
    def obstacle_of_streams(self) -> str | None:
        """Reason why operators with these settings cannot train on a stream, or None if they can."""
        return None if self.batch_options.is_global else STREAMS_NEED


@dataclass
class ReplicaMaker:
    """Creates the replica of a worker: the object that holds the training operator and runs the driver's calls.

    Attributes:
        runner_cls: Class of the replica.
        settings: The trainer's current settings.
    """

    runner_cls: Any
    settings: Any = None

    def __call__(self, world: World) -> Any:
        return self.runner_cls(self.settings, world)
