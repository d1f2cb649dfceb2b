"""`Placement`: the user's options for the workers' nodes, resources and runtime environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

from raysgd.core import arguments as checks
from raysgd.core.cluster.resources import Resources

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
