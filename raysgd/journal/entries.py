"""The lines of a journal as values whose types and ranges are checked.

The journal may come from a stranger. Everything that the library uses of it is one of these values, so no other module
checks it again. Each field says what a line may contain; entries of a line that are no field are ignored.

The options of the trainer are a closed list. None of their values names code, a file, a module or an environment
variable. An option that can, such as a dict for `compile`, is left out, and the user passes it again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, Literal, TypeVar

from raysgd.core.arguments import MAX_WORKERS
from raysgd.core.text.log_lines import printable

_ValueT = TypeVar("_ValueT")
_Read = Callable[[Any], Any]

_MOST = 2**53
_MOST_OF_BATCH = 2**27
_LARGEST = 1e300
_LONGEST_PATH = 4096
_DEEPEST = 100  # of objects and lists inside each other: code that walks through them calls itself


def _refuse(value: Any, needed: str) -> ValueError:
    shown = "a list" if isinstance(value, list) else "an object" if isinstance(value, dict) else printable(repr(value))
    return ValueError(f"is {shown}: need {needed}")


def _any_of(allowed: Iterable[Any]) -> str:
    return f"one of {', '.join(map(repr, allowed))}"


def _whole(least: int = 0, most: int = _MOST) -> _Read:
    def read(value: Any) -> int:
        if type(value) is not int or not least <= value <= most:
            raise _refuse(value, f"an integer from {least} to {most}")
        return value

    return read


def _switch(value: Any) -> bool:
    if type(value) not in (bool, int) or value not in (0, 1):
        raise _refuse(value, "true or false")
    return bool(value)


def _limit(value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value <= _LARGEST:
        raise _refuse(value, f"a number above 0 and up to {_LARGEST:g}")
    return float(value)


def _one_of(*allowed: Any) -> _Read:
    def read(value: Any) -> Any:
        if type(value) not in map(type, allowed) or value not in allowed:
            raise _refuse(value, _any_of(allowed))
        return value

    return read


def _or_none(read: _Read) -> _Read:
    return lambda value: None if value is None else read(value)


def _or_auto(read: _Read) -> _Read:
    return lambda value: value if value in (None, "auto") else read(value)


def _name(value: Any) -> str:
    if not isinstance(value, str):
        raise _refuse(value, "a text")
    return value


def _text(value: Any) -> str:
    """Read a text that is only shown. It cannot move the cursor of a terminal."""
    return printable(_name(value))


def _place(value: Any) -> str:
    """Read the path or the URI of a checkpoint."""
    try:
        is_path = 0 < len(os.fsencode(_name(value))) <= _LONGEST_PATH and "\0" not in value
    except UnicodeEncodeError:
        is_path = False
    if not is_path:
        raise _refuse(value, "a path")
    return str(value)


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _refuse(value, "an object in braces")
    return value


def _list_of(read: _Read) -> _Read:
    def read_all(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise _refuse(value, "a list")
        return tuple(map(read, value))

    return read_all


def _lane(value: Any) -> tuple[int, ...]:
    numbers: tuple[int, ...] = _list_of(_whole())(value)
    if len(numbers) != 4:
        raise _refuse(value, "a list of four integers")
    return numbers


def _entry(read: _Read, name: str = "", default: Any = MISSING) -> Any:
    """Declare a field that is read from a line.

    Args:
        read: Returns the checked value, or raises a `ValueError`.
        name: Name of the entry in the line, if it is not that of the field.
        default: Value if the line has no such entry. Without a default, the entry is needed.
    """
    return field(default=default, metadata={"read": read, "name": name})


def _made(kind: type[_ValueT], entries: Mapping[str, Any], **others: Any) -> _ValueT:
    """Read all fields of a dataclass.

    Args:
        kind: The dataclass, whose fields were declared with `_entry`.
        entries: The entries of the line.
        **others: Values of fields that are not in the line.

    Raises:
        ValueError: An entry is missing, or its value is not allowed.
    """
    values = dict(others)
    for each in fields(kind):  # type: ignore[arg-type]
        name = each.metadata.get("name") or each.name
        if "read" not in each.metadata or (name not in entries and each.default is not MISSING):
            continue
        if name not in entries:
            raise ValueError(f"`{name}` is missing")
        try:
            values[each.name] = each.metadata["read"](entries[name])
        except ValueError as error:
            text = str(error)  # the entry of an entry has the name `data.seed`
            raise ValueError(f"`{name}.{text[1:]}" if text.startswith("`") else f"`{name}` {text}") from None
    return kind(**values)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of the trainer that ran the steps.

    Attributes:
        left_out: Names of options that the journal does not hold, or that are not taken from it because they can name
            code. The fields have their defaults instead.
    """

    strategy: str = _entry(_one_of("ddp", "fsdp", "none"))
    use_horovod: bool = _entry(_switch)
    use_gpu: bool = _entry(_switch)
    split_batches: bool = _entry(_switch)
    micro_batch_size: int | Literal["auto"] | None = _entry(_or_auto(_whole(1, _MOST_OF_BATCH)))
    deterministic: bool = _entry(_switch)
    num_shards: int = _entry(_whole(1, MAX_WORKERS))
    seed: int | None = _entry(_or_none(_whole(0, 2**31 - 1)), default=None)
    add_dist_sampler: bool = _entry(_switch, default=True)
    scheduler_step_freq: str | None = _entry(_one_of(None, "", "batch", "epoch", "manual"), default=None)
    use_fp16: bool | str = _entry(_one_of(False, True, 0, 1, "apex"), default=False)
    precision: str | None = _entry(_one_of(None, "fp32", "fp16", "bf16", "apex"), default=None)
    accumulate_grad_batches: int = _entry(_whole(1), default=1)
    clip_grad_norm: float | None = _entry(_or_none(_limit), default=None)
    clip_grad_value: float | None = _entry(_or_none(_limit), default=None)
    sync_batchnorm: bool = _entry(_switch, default=False)
    compile: bool = _entry(_switch, default=False)
    activation_checkpointing: bool = _entry(_switch, default=False)
    left_out: tuple[str, ...] = ()


TRAINER_ARGUMENTS = tuple(
    each.name for each in fields(RunOptions) if "read" in each.metadata and each.default is not MISSING
)
"""The options that are arguments of `TorchTrainer` as they are, and that a user can pass again."""


def _options(value: Any) -> RunOptions:
    groups = [_object(_object(value).get(name, {})) for name in ("batch_options", "step_options")]
    entries = {**value, **groups[0], **groups[1]}
    if isinstance(entries.get("compile"), dict):
        del entries["compile"]
    options = _made(RunOptions, entries)
    if options.micro_batch_size is not None and not (options.split_batches or options.deterministic):
        raise ValueError("`micro_batch_size` splits a global batch, and the run had none")
    return replace(options, left_out=tuple(name for name in TRAINER_ARGUMENTS if name not in entries))


@dataclass(frozen=True, kw_only=True)
class RunLine:
    """The line of a program that started or resumed the run.

    Attributes:
        config: The config, without objects and secrets. It is data for the user's `setup`, of any names and values.
        config_left_out: Names of the entries of the config that the journal does not hold.
        options: The options of the trainer.
        epochs, validation_freq: The arguments of `fit`.
        has_dataset: True if `fit` got a `dataset`.
    """

    config: Mapping[str, Any] = _entry(_object)
    config_left_out: tuple[str, ...] = _entry(_list_of(_name))
    options: RunOptions = _entry(_options)  # noqa: RUF009
    epochs: int | None = _entry(_or_none(_whole()))
    validation_freq: int = _entry(_whole())
    has_dataset: bool = _entry(_switch)


@dataclass(frozen=True, kw_only=True)
class BatchRule:
    """The rule by which global batches were divided, as in `raysgd.torch.data.sampling.GlobalBatchRule`."""

    cap: int | None = _entry(_or_none(_whole(1, _MOST_OF_BATCH)))
    num_shards: int = _entry(_whole(0, MAX_WORKERS))
    multiple: int = _entry(_whole(1, MAX_WORKERS))


def _rule(value: Any) -> BatchRule:
    return _made(BatchRule, _object(value))


@dataclass(frozen=True, kw_only=True)
class LoaderLayout:
    """A dataset whose samples the library divided over the workers."""

    order: str = _entry(_text)
    seed: int = _entry(_whole(0, 2**64 - 1))
    num_samples: int = _entry(_whole())
    is_of_batches: bool = _entry(_switch, default=False)
    batch_size: int = _entry(_whole(1, _MOST_OF_BATCH))
    drop_last: bool = _entry(_switch)
    rule: BatchRule | None = _entry(_or_none(_rule))  # noqa: RUF009
    kind: str = "loader"


@dataclass(frozen=True, kw_only=True)
class StreamLayout:
    """A stream. `stream` and the positions of the lanes are compared with the stream of the program before use."""

    batch_size: int = _entry(_whole(1, _MOST_OF_BATCH))
    seed: int = _entry(_whole(0, 2**64 - 1))
    stream: Mapping[str, Any] = _entry(_object)
    turn: int = _entry(_whole())
    lanes: tuple[tuple[int, ...], ...] | None = _entry(_or_none(_list_of(_lane)))
    kind: str = "stream"


@dataclass(frozen=True, kw_only=True)
class OtherLayout:
    """Data that the library did not divide."""

    name: str = _entry(_text)
    kind: str = "undivided"


Layout = LoaderLayout | StreamLayout | OtherLayout
_LAYOUTS: dict[str, type[Layout]] = {each.kind: each for each in (LoaderLayout, StreamLayout, OtherLayout)}


def _class_of(entries: Mapping[str, Any], classes: Mapping[str, type[_ValueT]]) -> type[_ValueT]:
    """Return the class of an object by its entry `kind`."""
    kind = entries.get("kind")
    if not isinstance(kind, str) or kind not in classes:
        raise ValueError(f"`kind` {_refuse(kind, _any_of(classes))}")
    return classes[kind]


def _layout(value: Any) -> Layout:
    return _made(_class_of(_object(value), _LAYOUTS), value)


@dataclass(frozen=True, kw_only=True)
class Leg:
    """A leg: a part of an epoch that one group of workers ran.

    Attributes:
        after: Number of the step after which the leg starts.
        until: Number of the last step of the leg.
        pass_index: Number of the pass over the data, from 0.
        consumed: Number of samples of the pass that were used before the leg.
        num_workers: Number of workers in the group.
        window: Number of batches of a worker in a step.
        is_of_call: True if the data is the `dataset` of `fit`.
        obstacle: Reason why the journal has no steps of the leg, or None.
        data: The data, and how it was divided.
        run: The program that ran the leg.
    """

    after: int = _entry(_whole(), "step")
    pass_index: int = _entry(_whole(), "pass")
    consumed: int = _entry(_whole())
    num_workers: int = _entry(_whole(1, MAX_WORKERS))
    window: int = _entry(_whole(1))
    is_of_call: bool = _entry(_switch)
    obstacle: str | None = _entry(_or_none(_text))
    data: Layout = _entry(_layout)  # noqa: RUF009
    run: RunLine
    until: int = 0

    @property
    def epoch(self) -> int:
        """Number of the epoch that the leg is a part of, from 1."""
        return self.pass_index + 1


@dataclass(frozen=True, kw_only=True)
class CheckpointLine:
    """The line of a checkpoint: the step after which it was saved, and its path or URI as the run wrote it."""

    step: int = _entry(_whole())
    location: str = _entry(_place)


@dataclass(frozen=True, kw_only=True)
class GapLine:
    """The line of a range of steps whose records may be missing or incomplete."""

    step: int = _entry(_whole(), "last_step")


@dataclass(frozen=True, kw_only=True)
class LeftOutLine:
    """The line of a step that a callback left out.

    Attributes:
        step: Number of the step.
        optimizer: Index of the optimizer that did not step.
        reason: Why the step was bad.
        ranks: The ranks whose loss was not finite.
        back_to: Number of the step after which the state was restored, or None.
    """

    step: int = _entry(_whole(1))
    optimizer: int = _entry(_whole())
    reason: str = _entry(_text)
    ranks: tuple[int, ...] = _entry(_list_of(_whole(0, MAX_WORKERS)))
    back_to: int | None = _entry(_or_none(_whole()))

    def __str__(self) -> str:
        ranks = f" on rank {', '.join(map(str, self.ranks))}" if self.ranks else ""
        also = "" if self.back_to is None else f"; the state after step {self.back_to} was restored"
        return f"left out: {self.reason}{ranks}{also}"


RUN, LEG, CHECKPOINT, GAP, LEFT_OUT = "run", "leg", "checkpoint", "gap", "left_out"
Line = RunLine | Leg | CheckpointLine | GapLine | LeftOutLine
_LINES: dict[str, type[Line]] = {
    RUN: RunLine,
    LEG: Leg,
    CHECKPOINT: CheckpointLine,
    GAP: GapLine,
    LEFT_OUT: LeftOutLine,
}


def read_line(entries: Any, run: RunLine | None) -> Line:
    """Return a line of a journal as a checked value.

    Args:
        entries: The line, as it was read from JSON.
        run: The last line that describes a program, or None if there is none before this line.

    Raises:
        ValueError: The line is not valid. The message is to follow "is damaged: ".
    """
    if not isinstance(entries, dict):
        raise ValueError("need an object in braces")
    if _is_deep(entries, _DEEPEST):
        raise ValueError(f"need at most {_DEEPEST} objects and lists inside each other")
    kind = _class_of(entries, _LINES)
    if kind is not Leg:
        return _made(kind, entries)
    if run is None:
        raise ValueError("no line before it describes the program of the run")
    leg = _made(Leg, entries, run=run)
    if isinstance(leg.data, LoaderLayout) and not leg.data.is_of_batches and leg.consumed > leg.data.num_samples:
        raise ValueError(f"`consumed` is {leg.consumed}, and the pass has {leg.data.num_samples} samples")
    return leg


def _is_deep(value: Any, most: int) -> bool:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return bool(inside) and (most == 0 or any(_is_deep(each, most - 1) for each in inside))
