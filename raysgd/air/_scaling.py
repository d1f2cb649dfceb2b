"""`ScalingConfig`: the number of workers of a run, and what each needs. Search spaces of Ray Tune are left alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from raysgd._arguments.checks import accelerator, check_amount, check_num_workers, check_seconds, refuse_text
from raysgd.exceptions import InvalidCountError

if TYPE_CHECKING:
    from ray.tune import PlacementGroupFactory

_STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
_HINT_WORKERS = "Pass a number, `num_workers=2`, or the least and the most, `num_workers=(1, 4)`."


@dataclass(eq=False)
class ScalingConfig:
    """The number of workers of a run, and what each of them needs.

    Examples:
        >>> ScalingConfig(num_workers=2).total_resources
        {'CPU': 3.0}
        >>> ScalingConfig(num_workers=(1, 4), resources_per_worker={"CPU": 2}).worker_range
        (1, 4)

    Attributes:
        trainer_resources: What the trial itself needs; None for one CPU. `fit` runs in the driver, so it reserves only
            what you pass.
        num_workers: How many workers; or `(least, most)` for as many as there is room for.
        use_gpu: Whether each worker gets a GPU.
        resources_per_worker: What each worker needs; None for one CPU, or for one GPU with `use_gpu`. In a dict that
            you pass, a missing "CPU" is 0 and a missing "GPU" is 1 with `use_gpu`.
        placement_strategy: How Ray places the workers: "PACK", "SPREAD", "STRICT_PACK" or "STRICT_SPREAD".
        _max_cpu_fraction_per_node: Accepted for the old library's scripts. Today's Ray has no use for it.
        elastic_resize_monitor_interval_s: How often a run on fewer workers than it might have looks for room, in
            seconds; it grows after a checkpoint.
        accelerator_type: The kind of GPU that workers need, by the name that Ray has for it, such as "A100".
        label_selector: The labels that a node has to have for a worker, as Ray selects nodes: `{"region": "us-west"}`.
        elastic: Whether the function goes on where it is when other workers are lost, with those that are left, instead
            of starting again from its checkpoint. Needs a range of workers; see `raysgd.train.Trainer`.
        spare_workers: How many more workers wait, ready, to step in for lost ones; with `elastic` only.

    Raises:
        ValueError, TypeError: A value that cannot be, or GPUs that contradict `use_gpu`.
    """

    trainer_resources: dict[str, float] | None = None
    num_workers: int | tuple[int, int] | None = None
    use_gpu: bool = False
    resources_per_worker: dict[str, float] | None = None
    placement_strategy: str = "PACK"
    _max_cpu_fraction_per_node: float | None = None
    elastic_resize_monitor_interval_s: float = 60.0
    accelerator_type: str | None = None
    label_selector: dict[str, str] | None = None
    elastic: bool = False
    spare_workers: int = 0

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Checks the values again, for instance after you have changed one. Search spaces are left alone.

        Raises:
            ValueError, TypeError: A value that cannot be, or GPUs that contradict `use_gpu`.
        """
        refuse_text(use_gpu=self.use_gpu, elastic=self.elastic)
        if not is_open(self.elastic_resize_monitor_interval_s):
            check_seconds("elastic_resize_monitor_interval_s", self.elastic_resize_monitor_interval_s)
        if self.num_workers is not None and not is_open(self.num_workers):
            self.num_workers = _checked_workers(self.num_workers)
        if not is_open(self.placement_strategy) and self.placement_strategy not in _STRATEGIES:
            allowed = ", ".join(f'"{name}"' for name in _STRATEGIES)
            raise ValueError(f"`placement_strategy={self.placement_strategy!r}`: allowed are {allowed}.")
        if not is_open(self.accelerator_type):
            accelerator(self.accelerator_type)
        for name in ("trainer_resources", "resources_per_worker"):
            _check_resources(name, getattr(self, name))
        self._check_labels()
        if not is_open(self.use_gpu) and not is_open(self.resources_per_worker):
            self._check_gpus()

    def _check_labels(self) -> None:
        labels = self.label_selector
        if labels is None:
            return
        if not isinstance(labels, dict) or not all(isinstance(text, str) for each in labels.items() for text in each):
            raise ValueError(
                f"`label_selector={labels!r}`: need a dict of labels and values for all workers alike, such as "
                '`{"region": "us-west"}`, or None.'
            )
        if labels and self.is_elastic:
            raise ValueError(
                f"`label_selector={labels!r}` and `num_workers={self.num_workers!r}`: with a range, room is counted on "
                "all nodes. Pass one number of workers, or a custom resource in `resources_per_worker`."
            )

    def _check_gpus(self) -> None:
        num_gpus = (self.resources_per_worker or {}).get("GPU", int(self.use_gpu))
        if is_open(num_gpus):
            return
        if not self.use_gpu and num_gpus > 0:
            raise ValueError(
                f'`resources_per_worker` has "GPU": {num_gpus!r}, and `use_gpu=False`: pass `use_gpu=True`, or leave '
                '"GPU" out.'
            )
        if self.use_gpu and num_gpus == 0:
            raise ValueError('`use_gpu=True`, and `resources_per_worker` has "GPU": 0: leave one of them out.')

    # ------------------------------------------------------------------------------------------------ how many workers

    @property
    def worker_range(self) -> tuple[int, int]:
        """The least and the most workers of the run; the same number twice where it is fixed.

        Raises:
            InvalidCountError: There is no number yet, or a search space in its place.
        """
        workers = self.num_workers
        if workers is None or is_open(workers):
            raise InvalidCountError(f"`num_workers={workers!r}`: a run needs a number of workers. {_HINT_WORKERS}")
        return workers if isinstance(workers, tuple) else (workers, workers)

    @property
    def is_elastic(self) -> bool:
        """True if the number of workers may change while the run lasts."""
        return isinstance(self.num_workers, tuple) and self.num_workers[0] < self.num_workers[1]

    # ------------------------------------------------------------------------------------------------------- resources

    @property
    def worker_bundle(self) -> dict[str, float]:
        """The resources that one worker needs, without zeros."""
        kind = accelerator(self.accelerator_type)
        if self.resources_per_worker is None:
            return {"GPU" if self.use_gpu else "CPU": 1.0, **kind}
        return _without_zeros({"GPU": int(self.use_gpu), **self.resources_per_worker, **kind})

    @property
    def trainer_bundle(self) -> dict[str, float]:
        """The resources that the trial itself needs, without zeros."""
        return {"CPU": 1.0} if self.trainer_resources is None else _without_zeros(self.trainer_resources)

    @property
    def total_resources(self) -> dict[str, float]:
        """The resources that the trial and its workers need together; of a range, with the least workers."""
        total: dict[str, float] = {}
        for bundle in self._bundles():
            for name, amount in bundle.items():
                total[name] = total.get(name, 0.0) + amount
        return total

    @property
    def num_cpus_per_worker(self) -> float:
        """CPUs of a worker."""
        return self.worker_bundle.get("CPU", 0.0)

    @property
    def num_gpus_per_worker(self) -> float:
        """GPUs of a worker."""
        return self.worker_bundle.get("GPU", 0.0)

    @property
    def additional_resources_per_worker(self) -> dict[str, float]:
        """The resources that a worker needs beside CPUs and GPUs."""
        return {name: amount for name, amount in self.worker_bundle.items() if name not in ("CPU", "GPU")}

    def _bundles(self) -> list[dict[str, float]]:
        num_workers = 0 if self.num_workers is None else self.worker_range[0]
        return [self.trainer_bundle, *(self.worker_bundle for _ in range(num_workers))]

    def as_placement_group_factory(self) -> PlacementGroupFactory:
        """Return what Ray Tune reserves for a trial: a bundle for the trial, then one for each worker.

        Of a range it reserves the least workers, without which the run cannot start.
        """
        from ray.tune import PlacementGroupFactory

        return PlacementGroupFactory(self._bundles(), strategy=self.placement_strategy)

    @classmethod
    def from_placement_group_factory(cls, pgf: PlacementGroupFactory) -> ScalingConfig:
        """The config for which Ray Tune has made a reservation.

        Raises:
            ValueError: Its workers have different resources.
        """
        trainer, *workers = [dict(bundle) for bundle in pgf.bundles]
        if pgf.head_bundle_is_empty:
            trainer, workers = {}, [trainer, *workers]
        if any(worker != workers[0] for worker in workers):
            raise ValueError(f"`pgf={pgf!r}`: all bundles after the first must be equal, like all workers.")
        return cls(
            trainer_resources=trainer or {"CPU": 0},
            num_workers=len(workers) or None,
            use_gpu=bool(workers and workers[0].get("GPU")),
            resources_per_worker=workers[0] if workers else None,
            placement_strategy=pgf.strategy,
        )

    # ------------------------------------------------------------------------------------------------------ comparison

    def __eq__(self, other: object) -> bool:
        """Return whether both need the same: the same bundles, placed in the same way."""
        return isinstance(other, ScalingConfig) and self._needs() == other._needs()

    __hash__ = None  # type: ignore[assignment]  # it can be changed

    def _needs(self) -> Any:
        values = [getattr(self, each.name) for each in fields(self)]
        inner = [amount for value in values if isinstance(value, Mapping) for amount in value.values()]
        if any(is_open(value) for value in values + inner):
            return values
        workers = self.worker_range if self.num_workers is not None else None
        bundle = self.worker_bundle if workers else None
        return self.trainer_bundle, bundle, workers, self.placement_strategy, self.label_selector or None


def is_open(value: Any) -> bool:
    """Return whether Ray Tune still has to choose the value: a grid, or a space to sample from."""
    if isinstance(value, Mapping):
        return set(value) == {"grid_search"}
    return any(owner.__module__.startswith("ray.tune.") for owner in type(value).__mro__)


def _checked_workers(num_workers: Any) -> int | tuple[int, int]:
    if not isinstance(num_workers, tuple | list):
        return check_num_workers("num_workers", num_workers, _HINT_WORKERS)
    if len(num_workers) != 2:
        raise InvalidCountError(
            f"`num_workers={num_workers!r}`: need two numbers, the least and the most. {_HINT_WORKERS}"
        )
    least, most = (check_num_workers("num_workers", each, _HINT_WORKERS) for each in num_workers)
    if least > most:
        raise InvalidCountError(f"`num_workers={num_workers!r}`: the least is above the most. {_HINT_WORKERS}")
    return least, most


def _check_resources(name: str, resources: Any) -> None:
    if resources is None or is_open(resources):
        return
    if not isinstance(resources, Mapping) or not all(isinstance(key, str) for key in resources):
        raise ValueError(f'`{name}={resources!r}`: need a dict of names and amounts, such as `{{"CPU": 2}}`, or None.')
    for key, amount in resources.items():
        if not is_open(amount):
            check_amount(f"{name}[{key!r}]", amount)


def _without_zeros(resources: Mapping[str, float]) -> dict[str, float]:
    return {name: float(amount) for name, amount in resources.items() if amount}
