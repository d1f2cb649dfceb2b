"""The messages between a trainer and a worker about epochs, and how user methods are called with what they contain.

- `RunnerFacts`: what a worker reports after it has created its training operator
- `EpochRequest` and `EpochAnswer`: one `train` or `validate` call
- `BegunEpoch`: the progress of an epoch that a run left unfinished, with each rank's metrics so far, from which a later
  run continues the epoch

This module does no I/O.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from raysgd.core.arguments import is_saved_count
from raysgd.core.arrays.user_data import RayBatches
from raysgd.core.engine.shared.types import Heartbeat
from raysgd.core.numbers import results
from raysgd.core.numbers.meters import MetricSummary
from raysgd.trainer.messages.comparison import JointWork, WeightSums

VALIDATES = "validates"
"""Key in the `info` of an epoch. Its value is True if `fit` validates after epochs."""


@dataclass(frozen=True)
class EpochRequest:
    """The request of the driver to one worker for one `train` or `validate` call.

    Attributes:
        num_steps: Maximum number of steps, or None for no limit.
        info: The `info` that the user passed to `train` or `validate`, for the operator.
        profile: True if a worker must also return how long each phase of the call took.
        seed: Seed of the random order in which samples are used.
        shard_key: Key that identifies a dataset that the user passed to the call. None if the call uses the data that
            the operator registered.
        redraw: Function that a worker in the driver process calls between steps, about ten times a second. It passes
            the progress to listeners such as a progress bar. If the driver is the only worker, the function also stops
            a training call that must end early. None for other workers.
        starts_over: True to start an evaluation from the first batch, even if the last call stopped inside the data.
        compares_ranks: True if a worker must also return checksums of its weights.
        call_number: Number of the training call. A worker continues an unfinished call only if the request has the same
            number.
        attempt: Number of the attempt at a training call, starting at 1. When the group of workers changes during the
            call, the new group starts the next attempt.
        hold_at: Number of steps of a training call after which all ranks pause the call, or None for no pause.
        largest_batch: Number of samples that a worker processes at once in training, found by
            `micro_batch_size="auto"`. None to leave it unchanged.
        is_inside: True for a validation in the middle of an epoch, which must not affect random numbers and metrics in
            the rest of the epoch.
        begun: The unfinished epoch to continue, if an earlier run stopped inside an epoch. Otherwise, None.
    """

    num_steps: int | None
    info: Mapping[str, Any]
    profile: bool
    seed: int = 0
    shard_key: str | None = None
    redraw: Callable[[], None] | None = None
    starts_over: bool = field(default=False, kw_only=True)
    compares_ranks: bool = field(default=False, kw_only=True)
    call_number: int = field(default=0, kw_only=True)
    attempt: int = field(default=0, kw_only=True)
    hold_at: int | None = field(default=None, kw_only=True)
    is_inside: bool = field(default=False, kw_only=True)
    largest_batch: int | None = field(default=None, kw_only=True)
    begun: BegunEpoch | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class EpochAnswer:
    """A worker's answer to an `EpochRequest`. A number of samples is 0 if it is unknown.

    Attributes:
        metrics: Metrics of the call. None if the operator's `train_epoch` or `validate` did not return a mapping.
        returned: What the operator's method returned, if it is not a mapping.
        num_steps: Number of steps of the call, including steps in which the worker had no batch.
        epoch_idx: Index of the epoch in which a training call began, or of the last epoch before an evaluation.
        heartbeat: The worker's progress and time measurements at the end of a training call.
        place: Position at which a training call stopped in data that the user passed to it. Otherwise, None.
        joint_work: Record of the actions, such as all-reduces, that must be the same on all ranks. None if these
            actions are not recorded.
        weight_sums: Checksums of the weights, if they were requested.
        num_inherited: Number of samples whose metrics this worker took over from lost workers.
        num_used: Number of samples that all ranks together have trained on in the call. If the call spans several
            passes over the data, only the samples of the last pass count.
        call_number: Number of the training call that the worker has answered.
        largest_batch: Number of samples that the worker processes at once. See `EpochRequest`.
    """

    metrics: MetricSummary | None
    returned: Any
    num_steps: int
    epoch_idx: int = 0
    heartbeat: Heartbeat | None = None
    place: Mapping[str, Any] | None = None
    joint_work: JointWork | None = None
    weight_sums: WeightSums | None = None
    num_inherited: float = 0
    num_used: int = 0
    call_number: int = 0
    largest_batch: int | None = None


INHERITED = "inherited_samples"
"""Key in the result of one worker: the number of samples in its metrics that lost workers had processed."""


def merged(answers: Sequence[EpochAnswer], reduce_results: bool) -> Any:
    """Merge the workers' metrics into one dict. If `reduce_results` is False, return a list of all workers' results.

    Raises:
        TypeError: An operator returned something that cannot be merged.
    """
    if not reduce_results:
        return [_own_result(answer) for answer in answers]
    metrics = [answer.metrics for answer in answers if answer.metrics is not None]
    if len(metrics) < len(answers):
        strange = next(answer.returned for answer in answers if answer.metrics is None)
        raise TypeError(
            f"The operator returned a `{type(strange).__name__}`, which cannot be merged over workers: return a "
            "dict of metrics, or pass `reduce_results=False` to get every worker's own."
        )
    return results.merge(metrics)


def _own_result(answer: EpochAnswer) -> Any:
    if answer.metrics is None:
        return answer.returned
    values = dict(answer.metrics)
    return {**values, INHERITED: answer.num_inherited} if answer.num_inherited else values


def accepted(method: Callable[..., Any], iterator: Any, **named: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return the positional and keyword arguments with which to call a user's `train_epoch` or `validate`.

    Methods written for the old library (`ray.util.sgd`) take `info` as the second positional argument, under any name.

    Args:
        method: The user's method.
        iterator: The iterator over batches, which is the first argument.
        **named: Further arguments by name. Those that the method does not accept are left out.
    """
    parameters = _parameters(method)[1:]
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        unnamed = [each for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD and each.name not in named]
        takes_info = bool(unnamed) and unnamed[0].default is inspect.Parameter.empty
        return ([iterator, named.pop("info")] if takes_info else [iterator]), named
    known = [each.name for each in parameters if each.name in named and each.kind is not each.POSITIONAL_ONLY]
    takes_info = bool(parameters) and parameters[0].name not in known and parameters[0].kind in _POSITIONAL
    return ([iterator, named["info"]] if takes_info else [iterator]), {name: named[name] for name in known}


def bind_batch_info(method: Callable[..., Any]) -> Callable[[Any, Mapping[str, Any]], Any]:
    """Wrap a user's method, such as `train_batch`, in a function that takes a batch and its `batch_info` dictionary.

    Besides the batch, the user's method can take `batch_info`, `batch_idx`, both or neither. Methods in the guide of
    the old library (`ray.util.sgd`) take `batch_idx`. Both can be keyword-only arguments. A second positional argument
    with any other name receives the `batch_info` dictionary.
    """
    parameters = _parameters(method)
    if parameters and parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL:
        del parameters[0]  # the first parameter is the batch
    known = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)} & _BATCH_ARGUMENTS
    first = parameters[0] if parameters else None
    takes_info_unnamed = first is not None and first.name not in known and first.kind in _POSITIONAL
    is_as_it_is = first is not None and first.kind in _POSITIONAL and known <= {first.name} - {"batch_idx"}
    if is_as_it_is and not hasattr(method, "__wrapped__"):  # a decorator may accept only keyword arguments
        return method
    if takes_info_unnamed:
        return lambda batch, info: method(batch, info, **{name: _told(name, info) for name in known})
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        known = known or {"batch_info"}
    return lambda batch, info: method(batch, **{name: _told(name, info) for name in known})


def _parameters(method: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of a method, without `self`."""
    method = inspect.unwrap(method, stop=lambda each: inspect.ismethod(each) or hasattr(each, "__signature__"))
    if not inspect.ismethod(method):
        return list(inspect.signature(method).parameters.values())
    parameters = _parameters_of(method.__func__)
    return list(parameters if parameters[0].kind is inspect.Parameter.VAR_POSITIONAL else parameters[1:])


@lru_cache
def _parameters_of(function: Callable[..., Any]) -> tuple[inspect.Parameter, ...]:
    """Return the parameters of a function from a cache, because they are needed in every epoch.

    The keys of the cache are plain functions. Bound methods would keep operators in memory.
    """
    return tuple(inspect.signature(function).parameters.values())


_BATCH_ARGUMENTS = {"batch_info", "batch_idx"}
_POSITIONAL = {
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.VAR_POSITIONAL,
}


def _told(name: str, info: Mapping[str, Any]) -> Any:
    return info if name == "batch_info" else info["batch_idx"]


@dataclass(frozen=True, kw_only=True)
class RunnerFacts:
    """The report of a worker to the driver after it has created its training operator and run the user's `setup`.

    Attributes:
        num_models: Number of registered models.
        num_optimizers: Number of registered optimizers.
        num_schedulers: Number of registered schedulers of learning rates.
        seed: Seed of this rank for the random order of samples.
        train_data: Properties of the training data that must be identical on all ranks. None if the library does not
            divide the data over the workers.
        validation_data: The same properties of the validation data.
        keeps_own_state: True if the user's class overrides `state_dict`. A validation or a prediction can change the
            state that this method returns.
        epoch_obstacle: Reason why an interrupted epoch must start over, or None if it can continue.
        ray_batches: Ray Data that the operator registered, under the keys "train" and "validation". Rank 0 reports it
            for all ranks, and the driver divides it over the workers.
        has_validation: True if validation data is registered, or if the user overrides `validate`. An override can work
            without registered data.
        keeps_global_batch: True if the size of the global batch does not depend on the number of workers.
        batch_size: Number of samples in a batch of this worker's training data, or None if unknown.
        is_synchronous: True if all ranks take part in every optimizer step.
        is_sharded: True if models are sharded, so that all ranks must take part in reading a model.
        plateau_metrics: Names of the epoch metrics that `ReduceLROnPlateau` schedulers need.
    """

    num_models: int
    num_optimizers: int
    num_schedulers: int = 0
    seed: int
    train_data: Any
    validation_data: Any
    keeps_own_state: bool
    epoch_obstacle: str | None = None
    ray_batches: Mapping[str, RayBatches] = field(default_factory=dict)
    has_validation: bool = False
    keeps_global_batch: bool = False
    batch_size: int | None = None
    is_synchronous: bool = True
    is_sharded: bool = False
    plateau_metrics: tuple[str, ...] = ()

    @property
    def counts(self) -> dict[str, int]:
        """The numbers of models and optimizers that a state dict for this operator must have."""
        counts = {"models": self.num_models, "optimizers": self.num_optimizers}
        return {**counts, "schedulers": self.num_schedulers} if self.num_schedulers else counts


_BY_RANK = ("by_rank", "lost")
_DAMAGES = (AttributeError, KeyError, OverflowError, TypeError, ValueError)
"""Errors that damaged data may cause."""


@dataclass(frozen=True)
class BegunEpoch:
    """The progress of an epoch that a run left unfinished, from which another run can continue the epoch.

    Attributes:
        num_steps: Number of the epoch's batches that each worker has trained on.
        epoch_idx: Index of the epoch, starting at 0.
        by_rank: Metrics that each rank has measured in this epoch.
        lost: Metrics of ranks that were lost before the run left the epoch.
        seconds: Seconds spent on training the epoch so far.
        global_step: Number of batches that each worker has trained on over all epochs.
        is_exhausted: True if all batches are done, but user code after the last batch may still have to run.
        owes_validation: True if a validation is due at this step but has not run yet.
        objects: Names of metrics that are objects, such as torchmetrics metrics. Their values exist only in the
            processes that measured them.
    """

    num_steps: int
    epoch_idx: int
    by_rank: tuple[MetricSummary, ...] = ()
    lost: tuple[MetricSummary, ...] = ()
    seconds: float = 0.0
    global_step: int = 0
    is_exhausted: bool = False
    owes_validation: bool = False
    objects: tuple[str, ...] = ()

    @staticmethod
    def of(states: Sequence[Any], **more: Any) -> BegunEpoch:
        """Create a `BegunEpoch` from the progress that the ranks reported.

        Args:
            states: The progress of each rank, as a `RunState`.
            **more: Values of other attributes.
        """
        first = states[0]
        by_rank = tuple((each.metrics or MetricSummary()).without_objects() for each in states)
        lost = tuple(first.lost.values())
        more["objects"] = () if first.metrics is None else tuple(first.metrics.objects)
        return BegunEpoch(first.num_steps, first.epoch_idx, by_rank, lost, is_exhausted=first.is_exhausted, **more)

    def as_data(self) -> dict[str, Any]:
        """Return this epoch's progress as data that can be written as JSON. Floats keep their exact values."""
        by_rank = {name: summaries_as_data(getattr(self, name)) for name in _BY_RANK}
        return {**vars(self), **by_rank, "objects": [*self.objects]}

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> BegunEpoch:
        """Create a `BegunEpoch` from the result of `as_data`.

        Raises:
            ValueError: The data is damaged.
        """
        try:
            return BegunEpoch(
                _count(data["num_steps"]),
                _count(data["epoch_idx"]),
                seconds=float(data["seconds"]),
                global_step=_count(data["global_step"]),
                is_exhausted=bool(data["is_exhausted"]),
                owes_validation=bool(data.get("owes_validation")),
                objects=tuple(map(str, data.get("objects", ()))),
                **{name: summaries_from_data(data[name]) for name in _BY_RANK},
            )
        except _DAMAGES as error:
            raise ValueError(f"The progress of an epoch beside the checkpoint is damaged: {error!r}") from error


def summaries_as_data(summaries: Iterable[MetricSummary]) -> list[dict[str, Any]]:
    """Return metrics as data that can be written as JSON.

    Floats keep their exact values. Metrics whose value is not a number are left out, but their totals are included.
    """
    return [_as_data(each) for each in summaries]


def summaries_from_data(data: Iterable[Mapping[str, Any]]) -> tuple[MetricSummary, ...]:
    """Return the metrics that `summaries_as_data` converted to data.

    Raises:
        Exception: The data is damaged, as in `_DAMAGES`.
    """
    return tuple(map(_from_data, data))


OpenSteps = tuple[int, tuple[MetricSummary, ...]]
"""Step of a checkpoint, and each rank's metrics of steps that loggers have not received yet."""


def open_steps_from_data(data: Sequence[Any] | None) -> OpenSteps | None:
    """Return the open steps in a sidecar, or None if there are none.

    Raises:
        ValueError: The data is damaged.
    """
    if not data:
        return None
    step, *by_rank = data
    try:
        return _count(step), summaries_from_data(by_rank)
    except _DAMAGES as error:
        raise ValueError(f"The metrics of steps in the file beside the checkpoint are damaged: {error!r}") from error


def _as_data(metrics: MetricSummary) -> dict[str, Any]:
    values = {str(name): _packed(value) for name, value in metrics.items() if isinstance(value, int | float)}
    totals = {str(name): [*map(_packed, total)] for name, total in metrics.totals.items()}
    return {"values": values, "totals": totals}


def _from_data(data: Mapping[str, Any]) -> MetricSummary:
    totals = {name: (_unpacked(total), _unpacked(count)) for name, (total, count) in data["totals"].items()}
    return MetricSummary({name: _unpacked(value) for name, value in data["values"].items()}, totals)


def _packed(value: float) -> int | str:
    """Convert a number to a form that JSON stores exactly.

    Floats become hexadecimal strings, because JSON has no infinity or NaN.
    """
    return value.hex() if isinstance(value, float) else int(value)


def _count(value: Any) -> int:
    if not is_saved_count(value):
        raise ValueError(f"{value!r:.50} is not a count")
    return int(value)


def _unpacked(value: Any) -> float:
    number = float.fromhex(value) if isinstance(value, str) else value
    if type(number) not in (int, float):
        raise TypeError(f"a number is a `{type(number).__name__}`")
    float(number)  # raises OverflowError for a number that could not be added to others
    return number


def execute(replica: Any, fn: Callable[[], Any]) -> Any:
    """Call the user's function without arguments in the worker, and return its result."""
    return fn()


def apply(replica: Any, fn: Callable[[Any], Any]) -> Any:
    """Call the user's function with the worker's training operator, and return its result."""
    return fn(replica.operator)
