"""Pure: one call of `train` or `validate` as the class-based front ends put it to a replica, and what it answers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from raysgd._numbers import results
from raysgd._numbers.meters import MetricSummary
from raysgd.arrays.data_kinds import DataPosition
from raysgd.engine.shared.types import Heartbeat
from raysgd.messages.joint_work import JointWork
from raysgd.messages.weight_sums import WeightSums

VALIDATES = "validates"
"""In the `info` of an epoch: whether `fit` validates after epochs."""


@dataclass(frozen=True)
class EpochRequest:
    """One call of `train` or `validate`, as one worker sees it.

    A replica in the driver calls `redraw` between steps, some ten times a second: nothing else runs there that could
    show progress. `starts_over` makes an evaluation begin with the first batch, wherever the call before it stopped.

    `shard_key` names data that takes the place of what is registered. `compares_ranks` asks for sums of the weights.
    `call` is the number of a training call: only what was begun under it is continued, and answers it. `hold_at` is
    after how many batches of it all ranks stop, so that it can be left.
    """

    num_steps: int | None
    info: Mapping[str, Any]
    profile: bool
    seed: int
    shard_key: str | None = None
    redraw: Callable[[], None] | None = None
    starts_over: bool = False
    compares_ranks: bool = False
    call: int = 0
    hold_at: int | None = None


@dataclass(frozen=True)
class EpochAnswer:
    """The answer of a worker: metrics, or whatever else the operator returned, and how many batches were drawn.

    `epoch_idx` is the pass that a training call began with, or the one before an evaluation; `heartbeat` what a
    training call ended with; `place` where it stopped in data that only this call had; `joint_work` what it did that
    all ranks have to do alike, where that is recorded; `weight_sums` what its weights are, where that was asked;
    `num_inherited` how many samples of workers that are gone its metrics count; `num_used` how many samples all ranks
    have trained on in the call, or in its last pass. It is 0 where that is not known. `call` is the number of the
    training call that it answers.
    """

    metrics: MetricSummary | None
    returned: Any
    num_steps: int
    epoch_idx: int = 0
    heartbeat: Heartbeat | None = None
    place: DataPosition | None = None
    joint_work: JointWork | None = None
    weight_sums: WeightSums | None = None
    num_inherited: float = 0
    num_used: int = 0
    call: int = 0


INHERITED = "inherited_samples"
"""In a worker's own result: how many of its samples were those of workers that were lost."""


def merged(answers: Sequence[EpochAnswer], reduce_results: bool) -> Any:
    """The workers' results as one dict, or as the list that they are.

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
    """The arguments for an override of any generation: the iterator, and those of `named` that it takes.

    `info` is the second positional argument of the older generation, under whatever name the user gave it.
    """
    parameters = _parameters(method)[1:]
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        positional = [
            p for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD and p.name not in named
        ]
        if positional and positional[0].default is inspect.Parameter.empty:
            return [iterator, named.pop("info")], named
        return [iterator], named
    arguments: list[Any] = [iterator]
    keywords: dict[str, Any] = {}
    for index, parameter in enumerate(parameters):
        if parameter.name in named and parameter.kind is not inspect.Parameter.POSITIONAL_ONLY:
            keywords[parameter.name] = named[parameter.name]
        elif index == 0 and parameter.kind in (
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            inspect.Parameter.POSITIONAL_ONLY,
            inspect.Parameter.VAR_POSITIONAL,
        ):
            arguments.append(named["info"])
    return arguments, keywords


def bind_batch_info(method: Callable[..., Any]) -> Callable[[Any, Mapping[str, Any]], Any]:
    """`method` as a function of a batch and its info, whatever the user's override of it takes.

    That is `batch_info`, also by keyword only; `batch_idx`, as in the guide of the old library; both, or nothing more
    than the batch. Any other second argument is the info.
    """
    parameters = _parameters(method)
    if parameters and parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL:
        del parameters[0]  # the batch
    known = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)} & _BATCH_ARGUMENTS
    first = parameters[0] if parameters else None
    takes_info_unnamed = first is not None and first.name not in known and first.kind in _POSITIONAL
    is_as_it_is = first is not None and first.kind in _POSITIONAL and known <= {first.name} - {"batch_idx"}
    if is_as_it_is and not hasattr(method, "__wrapped__"):  # else what is around it may take names only
        return method
    if takes_info_unnamed:
        return lambda batch, info: method(batch, info, **{name: _told(name, info) for name in known})
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        known = known or {"batch_info"}
    return lambda batch, info: method(batch, **{name: _told(name, info) for name in known})


def _parameters(method: Callable[..., Any]) -> list[inspect.Parameter]:
    """Those that a caller passes."""
    method = inspect.unwrap(method, stop=lambda each: inspect.ismethod(each) or hasattr(each, "__signature__"))
    if not inspect.ismethod(method):
        return list(inspect.signature(method).parameters.values())
    parameters = _parameters_of(method.__func__)
    return list(parameters if parameters[0].kind is inspect.Parameter.VAR_POSITIONAL else parameters[1:])


@lru_cache
def _parameters_of(function: Callable[..., Any]) -> tuple[inspect.Parameter, ...]:
    """Each epoch asks for the same ones, and for the function alone: nothing else is kept."""
    return tuple(inspect.signature(function).parameters.values())


_BATCH_ARGUMENTS = {"batch_info", "batch_idx"}
_POSITIONAL = {
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.VAR_POSITIONAL,
}


def _told(name: str, info: Mapping[str, Any]) -> Any:
    return info if name == "batch_info" else info["batch_idx"]
