"""Settings that both `TorchTrainer` and `TFTrainer` accept. They are checked once, when they are created.

Each trainer adds its own options in a subclass of `ReplicaSettings`. The fields of these classes are the table of all
options: name, default, check, and where the option holds. `chosen` fills them with the arguments of a trainer. A new
option requires changes in three places: the trainer's signature and docstring, a field with its check here or in the
subclass, and the code that uses the option.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from difflib import get_close_matches
from functools import partial
from typing import Any, Literal, TypeVar

from raysgd.callbacks.worker_callback import WorkerCallback
from raysgd.core import arguments as checks
from raysgd.core.cluster import resources
from raysgd.core.cluster.ray_cluster import gpus_of_cluster
from raysgd.core.cluster.resources import DriverView, GpuChoice, Resources
from raysgd.core.config_keys import BATCH_SIZE
from raysgd.core.engine.shared.interface import EverySeconds
from raysgd.core.engine.shared.types import World
from raysgd.exceptions import InvalidCountError


@dataclass(frozen=True)
class BatchOptions:
    """Options for the size of the global batch, and for how the global batch is split among workers.

    The values are checked when an object is created, and cannot be changed later.

    Attributes:
        split_batches: If False, each worker's batch has the batch size of the loader. The global batch then grows with
            the number of workers, unless `deterministic` is True. If True, the global batch has the batch size of the
            loader for any number of workers.
        micro_batch_size: Maximum number of samples that a worker processes at once. Only with `split_batches=True` or
            `deterministic=True`. "auto" to halve the batches when a worker runs out of memory.
        deterministic: If True, each global batch is split into a fixed number of shards. The gradient of the global
            batch is then bitwise identical on any number of workers.
        num_shards: The number of these shards, which is the number of workers that the user requested.

    Raises:
        ValueError: A value is invalid, or two values contradict each other.
        InvalidCountError: A count is out of range.
    """

    split_batches: bool = False
    micro_batch_size: int | Literal["auto"] | None = None
    deterministic: bool = False
    num_shards: int = 1

    def __post_init__(self) -> None:
        checks.check_switch("split_batches", self.split_batches)
        if self.is_auto and (self.deterministic or not self.split_batches):
            raise ValueError(
                '`micro_batch_size="auto"` divides the batches of `split_batches=True` without `deterministic=True`, '
                "whose shards are fixed: pass only the first, or a number of samples."
            )
        if self.micro_batch_size is not None and not self.is_auto:
            count = checks.check_count(
                "micro_batch_size", self.micro_batch_size, 'It is what fits into a GPU or worker; "auto" finds it.'
            )
            object.__setattr__(self, "micro_batch_size", count)  # as a Python integer, even if it was a NumPy integer
            if not self.is_global:
                raise ValueError(
                    f"`micro_batch_size={count}` splits only a constant global batch: pass "
                    "`split_batches=True` too, or set the size of a worker's batch in its loader."
                )

        checks.refuse_text(deterministic=self.deterministic)

    @property
    def is_auto(self) -> bool:
        """True if the batches that a worker processes at once are halved when a worker runs out of memory."""
        return self.micro_batch_size == "auto"

    @property
    def cap(self) -> int | None:
        """Maximum number of samples that a worker processes at once, if the user has chosen one."""
        return None if self.micro_batch_size == "auto" else self.micro_batch_size

    @property
    def is_global(self) -> bool:
        """True if global batches have a fixed size, and the library splits them among the current workers."""
        return self.split_batches or self.deterministic

    @property
    def global_option(self) -> str:
        """Text for messages: the option that fixes the size of the global batch, such as "`split_batches=True`".

        Empty if no option does.
        """
        if self.split_batches:
            return "`split_batches=True`"
        return "`deterministic=True`" if self.deterministic else ""

    def global_size(self, size: Any, num_workers: int) -> int:
        """Return how many samples all workers together train on in one step.

        Args:
            size: The batch size in the trainer's config.
            num_workers: Number of workers.
        """
        if self.split_batches:
            return check_global_size(size)
        num_parts = self.num_shards if self.deterministic else num_workers
        return split_batch_size(size, num_parts) * num_parts

    def of_worker(self, size: Any, num_workers: int) -> Any:
        """Return how many samples one worker processes at once.

        Args:
            size: The batch size in the worker's config.
            num_workers: Number of workers.
        """
        if not self.split_batches or not checks.is_integer(size):
            return size
        return min(-(-size // num_workers), self.cap or size)

    def config_for(self, config: Mapping[str, Any], num_workers: int) -> dict[str, Any]:
        """Return the config for the operator of one worker.

        With `split_batches`, the config keeps the global batch size. With `deterministic`, the size of one shard
        replaces it. With neither option, the batch size of one worker replaces it. A plain `"batch_size"` is already
        the batch size of one worker. The config is a shallow copy: its values are the user's objects.

        Args:
            config: The trainer's config. Its `BATCH_SIZE` is the global batch size.
            num_workers: Number of workers.

        Raises:
            ValueError: The config's batch size is invalid or cannot be split.

        Examples:
            >>> BatchOptions().config_for({"*batch_size": 64, "lr": 0.1}, num_workers=4)
            {'*batch_size': 16, 'lr': 0.1}
        """
        if BATCH_SIZE not in config:
            return checks.with_entries(config)
        size = check_global_size(config[BATCH_SIZE])
        if not self.split_batches:
            size = split_batch_size(size, self.num_shards if self.deterministic else num_workers)
        return checks.with_entries(config, {BATCH_SIZE: size})


_PLAIN = "Pass a plain `int`."


def split_batch_size(requested: int, num_workers: int) -> int:
    """Return the batch size of one worker: the global batch size divided by the number of workers, rounded down.

    Args:
        requested: The global batch size, of any integer type. Search algorithms, for example, pass NumPy integers.
        num_workers: Number of workers, at least 1.

    Raises:
        ValueError: A value is not an integer or is below 1, or there are more workers than samples in a step.

    Examples:
        >>> split_batch_size(21, num_workers=2)
        10
    """
    num_samples = check_global_size(requested)
    size = checks.check_count("num_workers", num_workers, _PLAIN)
    per_worker = num_samples // size
    if per_worker == 0:
        raise ValueError(
            f"`config[{BATCH_SIZE!r}]={num_samples}` with `num_workers={size}`: this batch size is the global one, for "
            f"all workers, so it must be at least `num_workers`. Raise it to {size} or more, or use fewer workers."
        )
    return per_worker


def global_batch_in_words(num_workers: int, batch_size: int) -> str:
    """Describe a global batch whose size depends on the number of workers.

    Args:
        num_workers: Number of workers.
        batch_size: Number of samples in the batch of one worker.

    Examples:
        >>> global_batch_in_words(2, 32)
        '2 workers x 32 samples: a global batch of 64'
    """
    workers = "1 worker" if num_workers == 1 else f"{num_workers} workers"
    return f"{workers} x {batch_size} samples: a global batch of {num_workers * batch_size}"


def check_global_size(requested: Any) -> int:
    """Check a global batch size, and return it as a Python integer.

    Raises:
        ValueError: The batch size is not an integer or is below 1.
    """
    return checks.check_count(f"config[{BATCH_SIZE!r}]", requested, _PLAIN)


_OWN_ARGUMENTS = {"CPU": "num_cpus_per_worker", "GPU": "num_gpus_per_worker"}
_STRATEGIES = ("PACK", "SPREAD")


@dataclass(frozen=True)
class Placement:
    """Options for where Ray places workers, and for their resources besides CPUs and GPUs.

    The docstrings of `TorchTrainer` and `TFTrainer` explain each field except `labels`, which is the `label_selector`
    of a `ScalingConfig`.

    Raises:
        ValueError, TypeError: A value is invalid.
    """

    resources_per_worker: Mapping[str, float] | None = None
    accelerator_type: str | None = None
    placement_strategy: Literal["PACK", "SPREAD"] | None = None
    runtime_env: Mapping[str, Any] | None = None
    labels: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        self._check_resources()
        checks.accelerator(self.accelerator_type)
        if self.placement_strategy not in (None, *_STRATEGIES):
            near = get_close_matches(str(self.placement_strategy).upper(), _STRATEGIES, 1)
            hint = f' Did you mean "{near[0]}"?' if near else ""
            raise ValueError(
                f'`placement_strategy={self.placement_strategy!r}`: allowed are "PACK" (as few nodes as '
                f'possible), "SPREAD" (as many nodes as possible) and None (the trainer chooses).{hint}'
            )
        checks.check_runtime_env("runtime_env", self.runtime_env)

    def _check_resources(self) -> None:
        amounts = self.resources_per_worker
        if amounts is None:
            return
        if not isinstance(amounts, Mapping) or not all(isinstance(name, str) for name in amounts):
            raise TypeError(f'`resources_per_worker={amounts!r}`: need a dict, such as `{{"fast_disk": 1}}`, or None.')
        for name, amount in amounts.items():
            if name in _OWN_ARGUMENTS:
                raise ValueError(
                    f"`resources_per_worker` has {name!r}: pass `{_OWN_ARGUMENTS[name]}={amount!r}` instead."
                )
            checks.check_amount(f"resources_per_worker[{name!r}]", amount)

    @property
    def custom(self) -> dict[str, float]:
        """The resources of one worker besides CPUs and GPUs: a dict from resource names to amounts, as Ray expects."""
        return {**(self.resources_per_worker or {}), **checks.accelerator(self.accelerator_type)}

    def resources(self, num_cpus: float, num_gpus: float) -> Resources:
        """Return the resources, the runtime environment and the node labels with which to start one worker.

        Args:
            num_cpus: Number of CPUs for the worker.
            num_gpus: Number of GPUs for the worker.
        """
        return Resources(num_cpus, num_gpus, self.custom, dict(self.runtime_env or {}), dict(self.labels or {}))

    def packs(self, by_default: bool) -> bool:
        """Return True if workers are placed on as few nodes as possible.

        Args:
            by_default: The result if the user has set no `placement_strategy`.

        >>> Placement().packs(True), Placement().packs(False), Placement(placement_strategy="PACK").packs(False)
        (True, False, True)
        """
        return by_default if self.placement_strategy is None else self.placement_strategy == "PACK"


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """Options for worker failures, for timeouts, and for the snapshots to restart from.

    Pass it as `recovery` to `TorchTrainer` or `TFTrainer`.

    Args:
        in_place: True: the workers that survive a failure keep their processes and continue the call, if possible; see
            `docs/fault-tolerance.md`. If that is not possible, or if False, all workers restart from the last snapshot.
        wait_for_workers: Whether the workers that survive a failure wait for new workers, which start immediately.
            True: they wait up to 30 s. False: they never wait. "auto": they wait only if the global batch would shrink
            without new workers, or if they lack the memory for larger parts of each batch. With `BATCH_SIZE` or
            `split_batches=True`, the global batch does not shrink. If they do not wait, new workers join during the
            epoch.
        resize_interval_s: How often a trainer with too few workers checks for free resources during an epoch. None:
            only before each call. If `wait_for_workers` is "auto" and the size of the global batch depends on the
            number of workers, the trainer never checks during an epoch.
        heartbeat_s: A worker process that does not respond for this many seconds, because it is stopped or frozen,
            counts as lost. A worker that is still starting has at least 120 s to respond.
        form_timeout_s: Time limit for connecting all workers of a group with each other once they are ready. The
            trainer's `timeout_s` is an upper limit.
        settle_timeout_s: Time limit for a surviving worker to finish its step after a failure, and for a spare worker
            that runs a validation to finish its batch. A worker that takes longer is replaced.
        snapshot_every_s: How often to take a snapshot (a copy of the state to restart from) after a call. "auto":
            snapshots take at most 2 % of the time, but one is taken anyway once a restart would have to repeat more
            than 30 s of completed calls; with `use_local=True`, after each call. A number: at most once in that many
            seconds; 0: after each call. None: never; a failure that needs a snapshot then raises `WorkersLostError`.
        snapshot_every_n_steps: Number of steps between snapshots inside an epoch. None: only after calls. The driver
            collects snapshots four times a second, so choose a number of steps that takes a second or more.
        undo: What workers copy before each batch, so that they can repeat the batch if a failure interrupts it. None:
            model buffers always, and the state of all registered objects if needed; see `docs/recovery.md`. True: the
            state of all registered objects; only for `TorchTrainer`. False: nothing. The call then restarts from the
            last snapshot if a failure interrupts a batch.

    Raises:
        ValueError: A value is invalid.

    Examples:
        >>> from raysgd import Recovery
        >>> options = {"num_workers": 2, "recovery": Recovery(heartbeat_s=10.0)}
    """

    in_place: bool = True
    wait_for_workers: bool | Literal["auto"] = "auto"
    resize_interval_s: float | None = 60.0
    heartbeat_s: float = 30.0
    form_timeout_s: float = 120.0
    settle_timeout_s: float = 120.0
    snapshot_every_s: EverySeconds = "auto"
    snapshot_every_n_steps: int | None = None
    undo: bool | None = None

    def __post_init__(self) -> None:
        checks.check_switch("in_place", self.in_place)
        checks.check_switch("wait_for_workers", self.wait_for_workers, "auto")
        if self.resize_interval_s is not None:
            checks.check_seconds("resize_interval_s", self.resize_interval_s, may_be_least=False)
        checks.check_seconds("heartbeat_s", self.heartbeat_s, checks.MIN_HEARTBEAT_S)
        for name in ("form_timeout_s", "settle_timeout_s"):
            checks.check_seconds(name, getattr(self, name), may_be_least=False)
        checks.check_auto_seconds("snapshot_every_s", self.snapshot_every_s, "no snapshots")
        if self.snapshot_every_n_steps is not None:
            hint = "None copies the state between calls only."
            checks.check_count("snapshot_every_n_steps", self.snapshot_every_n_steps, hint)
        checks.check_switch("undo", self.undo, None)


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
        checks.check_seconds("timeout_s", self.timeout_s, may_be_least=False)

    @property
    def is_driver_only(self) -> bool:
        """True if the driver is the only worker."""
        return self.use_local and self.num_workers == 1

    def choose_gpus(self, use_gpu: bool | str, driver: DriverView, **options: Any) -> GpuChoice:
        """Decide how many GPUs each worker gets. With "auto", connect to Ray, unless this process is the only worker.

        Args:
            use_gpu: The user's argument.
            driver: What this process sees.
            **options: Further arguments of `resources.choose_gpus`.
        """
        ask_nodes = None if self.is_driver_only else partial(gpus_of_cluster, self.placement.custom)
        num_workers = self.num_workers + self.spare_workers
        return resources.choose_gpus(use_gpu, num_workers, driver, ask_nodes, has_driver=self.use_local, **options)

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
