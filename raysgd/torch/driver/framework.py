"""`TorchFramework`: what the driver of a `TorchTrainer` does differently from a `TFTrainer`'s.

It saves the state to files and loads it: checkpoint files, checkpoint folders, and safetensors files. From each, also
only parts can be loaded, such as the weights that fit.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from raysgd.callbacks.progress import LineBar, make_bar
from raysgd.core import arguments as checks
from raysgd.core.arrays.user_data import CallData, goes_to_all
from raysgd.core.connections.torch import TorchConnection, variables_of_nccl
from raysgd.core.engine.controller import ElasticController
from raysgd.core.engine.shared.interface import Call
from raysgd.core.engine.shared.types import World
from raysgd.core.engine.snapshots import Snapshot, own_states
from raysgd.core.engine.transfers import DividedValue
from raysgd.core.history.history import Kind
from raysgd.core.imports import require
from raysgd.core.numbers.results import CallProgress
from raysgd.core.state.state_codec import EncodedState, decode, lend
from raysgd.core.text.log_lines import errors_printable, printable_lines
from raysgd.exceptions import UnevenStepsError
from raysgd.storage import files
from raysgd.streams.source import check_stream_of_call
from raysgd.streams.stream import Stream
from raysgd.torch import constants
from raysgd.torch.checkpoints import checkpoint_file, divided, weights_file
from raysgd.torch.checkpoints.divided import StateInFolder
from raysgd.torch.data import call_data
from raysgd.torch.driver import arguments
from raysgd.torch.hosting.torch_state import CRITERION, REMADE
from raysgd.torch.objects import rng
from raysgd.torch.objects.loading import with_plain_names
from raysgd.torch.objects.precision import STATE_KEYS
from raysgd.torch.objects.rng import RNG
from raysgd.torch.operator.settings import TorchSettings
from raysgd.torch.step import schedulers
from raysgd.torch.torch_runner import TorchRunner
from raysgd.trainer.configuration import GroupSettings
from raysgd.trainer.driver.life import Framework, TrainerLife
from raysgd.trainer.driver.saving import Content, load_into_all, load_snapshot_into_all
from raysgd.trainer.messages.comparison import REASONS_OF_TORCH, check_equal, difference
from raysgd.trainer.messages.epochs import EpochAnswer, RunnerFacts
from raysgd.trainer.messages.prediction import BatchRequest, PredictionSource
from raysgd.trainer.worker.replica_state import RESUME, check_parts, check_progress, place_in
from raysgd.utils import BATCH_COUNT

logger = logging.getLogger(__name__)


@contextmanager
def epoch_bar(stream: Any = None) -> Iterator[Callable[[CallProgress], None]]:
    """Show a progress bar during the `with` block. Yield a function that updates the bar.

    Args:
        stream: File object to which the bar is written. Default: standard error.
    """
    bar, began = make_bar(stream or sys.stderr), time.monotonic()
    is_drawn, newest = type(bar) is not LineBar, list[CallProgress]()

    def show(progress: CallProgress) -> None:
        newest[:] = [progress]
        if is_drawn:
            values = {"loss": f"{progress.loss:.4g}"} if progress.loss is not None else {}
            bar.draw(_label(progress), progress.num_steps, progress.total, values)

    try:
        yield show
    finally:
        bar.clear()
    if newest and not is_drawn:
        bar.line(_line(newest[0], time.monotonic() - began))


def _line(progress: CallProgress, elapsed: float) -> str:
    line: str = require("tqdm", extra="progress", purpose="`use_tqdm=True`").tqdm.format_meter(
        n=progress.num_steps,
        total=progress.total,
        elapsed=elapsed,
        ncols=100,
        prefix=_label(progress),
        unit="batch",
        postfix=f"loss={progress.loss:.4g}" if progress.loss is not None else None,
    )
    return line


def _label(progress: CallProgress) -> str:
    epochs = f"/{progress.num_epochs}" if progress.num_epochs else ""
    return f"{progress.epoch_idx + 1}{epochs}e"


class TorchFramework(Framework):
    """Holds what the driver of a `TorchTrainer` does differently from a `TFTrainer`'s.

    Args:
        group: The trainer's settings for its workers.
        settings: The settings of the workers' operators.
    """

    runner_cls = TorchRunner
    shard_advice = "pass `add_dist_sampler=False`"
    acts_between_steps = True
    check_settings = staticmethod(arguments.check_batch_size)

    def __init__(self, group: GroupSettings, settings: TorchSettings) -> None:
        timeouts: dict[str, Any] = {"timeout_s": group.timeout_s, "form_timeout_s": group.recovery.form_timeout_s}
        if group.backend == "horovod":
            from raysgd.core.connections.horovod import HorovodConnection

            self.connection = HorovodConnection(**timeouts)
        else:
            joins_alone, variables = settings.may_grow, variables_of_nccl()
            self.connection = TorchConnection(group.backend, joins_alone, variables, **timeouts)
        self._shows_progress = settings.use_tqdm
        self.reservation_timeout_s = constants.SGD_PLACEMENT_GROUP_TIMEOUT_S
        self.keeps_survivors, self.renews_survivors = settings.keeps_survivors, settings.strategy == "fsdp"

    def check_reload(self, life: TrainerLife, operator_cls: Any) -> None:
        arguments.check_operator_class(operator_cls)
        is_horovod = life.group_settings.backend == "horovod"
        if life.facts.is_sharded or is_horovod:
            what = '`backend="horovod"`' if is_horovod else '`strategy="fsdp"`'
            raise ValueError(f"`reload` cannot work with {what}: save, and load into a new trainer with the new class.")

    def check_dataset(self, life: TrainerLife, dataset: Any, training: bool, name: str = "dataset") -> None:
        if isinstance(dataset, Stream):
            check_stream_of_call(dataset, name, life.settings.obstacle_of_streams)
            return
        has_others, options = life.controller.num_workers > 1, life.settings.batch_options
        steps_apart = training and has_others and not life.facts.is_synchronous
        divides = training and (has_others or options.deterministic or options.micro_batch_size is not None)
        global_option = options.global_option if divides else ""
        arguments.check_dataset(dataset, name, steps_apart=steps_apart, global_option=global_option)

    def call_data_of(self, data: Any, config: Mapping[str, Any]) -> CallData | None:
        return call_data.call_data_of(data, config)

    def goes_on_with(self, dataset: Any) -> bool:
        return goes_to_all(call_data.kind_of(dataset))

    @contextmanager
    def shown(self, life: TrainerLife) -> Iterator[None]:
        if not self._shows_progress:
            yield
            return
        with epoch_bar() as show, life.listeners.listening(show):
            yield

    def check_answers(self, life: TrainerLife, kind: Kind, answers: Sequence[EpochAnswer], num_steps: Any) -> None:
        if kind == "train" and life.facts.is_synchronous:
            check_alike(answers)
        counts = {answer.metrics.get(BATCH_COUNT) for answer in answers if answer.metrics is not None}
        if num_steps != 0 and counts == {0}:
            logger.warning(
                "the %s data has no batches: it is empty, or `drop_last` removed its only batch, or it is an iterator "
                "that was already exhausted",
                kind,
            )

    def after_evaluation(self, life: TrainerLife) -> None:
        # Evaluation may have changed the states of the workers' random number generators. `save` must write the new
        # states, which the newest snapshot lacks.
        life.controller.snapshots.touch_ranks()

    def after_validation(self, life: TrainerLife, trained: Mapping[str, Any], validated: Mapping[str, Any]) -> bool:
        metrics = life.facts.plateau_metrics
        values = schedulers.values_after_validation(metrics, trained, validated) if metrics else None
        if values:
            life.on_all(TorchRunner.step_plateaus, values, changes_state=True, keeps_alike=True)
        return bool(values)

    def to_predict(self, data: Any, asked: BatchRequest) -> PredictionSource:
        return call_data.source_to_predict(data, asked)

    def content_of(self, snapshot: Snapshot) -> Content:
        return content_of(snapshot, True, "torch")

    def place_in(self, snapshot: Snapshot) -> tuple[int, int]:
        return place_in(divided.outline(snapshot.shared_state))

    def load_state(self, life: TrainerLife, state: dict[str, Any]) -> None:
        load_state(life.controller, state)

    def load_snapshot(self, life: TrainerLife, snapshot: Snapshot) -> None:
        controller, shared = life.controller, snapshot.shared_state
        _check_parts(divided.outline(shared), controller.facts[0])
        if controller.ensure_group().is_driver_only:
            _restore_here(controller, divided.whole(shared, copy=False), snapshot.rank_states)
            return
        if isinstance(shared, DividedValue) and not controller.facts[0].is_sharded:
            lent = lend(divided.whole(shared, copy=False))
            snapshot = replace(snapshot, shared_state=lent, reference=None)
        load_snapshot_into_all(controller, TorchRunner.restore, snapshot)


def check_alike(answers: Sequence[EpochAnswer]) -> None:
    """Check that workers with synchronized models took the same steps in the same order and have equal weights.

    Args:
        answers: The workers' results, in the order of the ranks.

    Raises:
        UnevenStepsError: The workers trained on different numbers of batches, or their sequences of all-reduces and
            optimizer steps differ.
        RanksDifferError: The workers' weights differ.
    """
    counts = [answer.num_steps for answer in answers]
    if len(set(counts)) > 1:
        raise UnevenStepsError(
            f"The workers drew {counts} batches, but replicas that exchange gradients must take the same number of "
            'steps. Let `train_epoch` draw the same number of batches on all ranks, or pass `strategy="none"` and keep '
            "the replicas in sync yourself."
        )
    if words := difference(dict(enumerate(answers))):
        raise UnevenStepsError(words)
    check_equal({rank: answer.weight_sums for rank, answer in enumerate(answers)}, REASONS_OF_TORCH)


PARTS = ("models", "criterion", "optimizers", "schedulers", "precision", "operator", "progress")
"""Names of the parts of a checkpoint that `load(parts=...)` accepts."""

_WEIGHTS = ("models",)

Shape = tuple[int, ...]


def load_state(
    controller: ElasticController, state: dict[str, Any], held: ExitStack | None = None, *, is_file: bool = False
) -> None:
    """Load a state of the trainer into all workers.

    Args:
        controller: Controller of the workers.
        state: State to load, from the trainer's `state_dict`, from `_merged` or from a file.
        held: Exit stack that keeps a file open, if the state's tensors are memory-mapped from the file. It is closed
            once the state is in Ray's object store. Closing raises if another process wrote to the file in the
            meantime.
        is_file: True if `state` is the whole content of a file.

    Raises:
        ValueError: The state does not fit the registered objects. The workers are unchanged.
    """
    whole, rank_states, is_complete = _checked(controller, state, is_file)
    if controller.ensure_group().is_driver_only:
        _restore_here(controller, whole, rank_states)
        return
    stored = controller.ensure_group().store(lend(whole))
    if held is not None:
        held.close()
    load_into_all(controller, TorchRunner.restore, stored, rank_states, is_complete)


def _restore_here(controller: ElasticController, whole: Any, rank_states: tuple[Any, ...]) -> None:
    """Load a state into the only worker, which is the driver."""
    controller.run(Call(TorchRunner.restore, lambda worlds: [(whole, *own_states(rank_states, 1))]))


def _checked(
    controller: ElasticController, state: dict[str, Any], is_file: bool
) -> tuple[dict[str, Any], tuple[Any, ...], bool]:
    """Check a state to load. Return what all ranks share, the separate state of each rank, and a flag.

    The flag is True if the state comes from a file with a state for each rank of the current worker group. The loaded
    state is then the complete state of the workers, and recovery can restart from it.
    """
    _check_parts(state, controller.facts[0])
    check_progress(state["epoch"], state.get(RESUME))
    resume = dict(checkpoint_file.as_in_file(state).get(RESUME) or {})
    rank_states = _checked_rank_states(resume.pop(RNG, ()))
    # The last value is True if the same number of ranks saved the file. The file then has the random states of each
    # current rank, so the workers' state equals the state in the file once it is loaded.
    return {**state, RESUME: resume}, rank_states, is_file and len(rank_states) == controller.num_workers


def _checked_rank_states(states: Any) -> tuple[Any, ...]:
    if not isinstance(states, list | tuple):
        raise ValueError(f"The random states are a `{type(states).__name__}` instead of a list. Nothing was loaded.")
    for state in states:
        if state is not None:
            rng.check(state)
    return tuple(states)


def _check_parts(state: Mapping[str, Any], facts: RunnerFacts) -> None:
    schedulers = {"schedulers": facts.num_schedulers} if state.get("schedulers") else {}
    check_parts(state, {**facts.counts, **schedulers}, "operator")


FileFormat = Literal["torch", "safetensors"]


def check_format(name: Any) -> None:
    """Check that `save` supports the file format `name`, and that the format's package is installed.

    Raises:
        ValueError: The format is unknown.
        ImportError: The format is "safetensors", and safetensors is not installed.
    """
    if name not in ("torch", "safetensors"):
        guess = checks.did_you_mean(str(name), ("torch", "safetensors"))
        raise ValueError(f'`format={name!r}`: allowed are "torch" and "safetensors".{guess}')
    if name == "safetensors":
        weights_file.check_writable()


def content_of(
    snapshot: Snapshot, weights_only: bool, file_format: FileFormat, frozen: EncodedState | None = None
) -> Content:
    """Return the content of a checkpoint or weights file, and the function that writes the file.

    The tensors in the content share the snapshot's memory.

    Args:
        snapshot: State to save.
        weights_only: True to reject objects that `torch.load(..., weights_only=True)` would reject.
        file_format: Format of the file.
        frozen: Frozen parameters that the snapshot omits and the file must include. None to omit them from the file,
            as well.

    Raises:
        ValueError: The file would have a part of the state that cannot be loaded again.
    """
    state = checkpoint_file.as_in_file(divided.whole(snapshot.shared_state, copy=False))
    if frozen is not None and REMADE in state:
        state = _completed(state, decode(frozen, copy=False))
    if file_format == "safetensors":
        content = {key: value for key, value in state.items() if key in ("models", weights_file.LEFT_OUT)}
        return content, weights_file.write
    state[RESUME][RNG] = list(snapshot.rank_states)
    return checkpoint_file.packed(state, allow_pickle=not weights_only), checkpoint_file.write


def _completed(state: dict[str, Any], tensors: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return `state` with the frozen parameters that it omits.

    Args:
        state: State in which the models, and perhaps the criterion, lack their frozen parameters.
        tensors: Dicts of the frozen parameters by name, one for each model, then one for the criterion if it has any.
    """
    from raysgd.torch.objects.remade import completed

    models = [completed(*each) for each in zip(state["models"], tensors, strict=False)]
    full = {**{key: value for key, value in state.items() if key != REMADE}, "models": models}
    if CRITERION in full and len(tensors) > len(models):
        full[CRITERION] = completed(full[CRITERION], tensors[len(models)])
    return full


def save_folder(controller: ElasticController, checkpoint: Any, weights_only: bool) -> None:
    """Save sharded models: let each worker write its shard into a checkpoint folder, then complete the folder.

    Args:
        controller: Controller of the workers.
        checkpoint: Path of the folder.
        weights_only: True to reject objects that `torch.load(..., weights_only=True)` would reject.

    Raises:
        ValueError: The folder would have a part of the state that cannot be loaded again.
        OSError: The folder could not be written.
    """
    with files.state_is_kept(), divided.making_folder(checkpoint) as folder:

        def arguments(worlds: Sequence[World]) -> list[tuple[str]]:
            return [(divided.emptied_folder(folder),)] * len(worlds)

        parts = controller.run(Call(TorchRunner.write_part, arguments))
        rest = checkpoint_file.as_in_file(parts[0].rest)
        rest[RESUME] = {**rest[RESUME], RNG: [part.own for part in parts]}
        divided.finish_folder(folder, parts, checkpoint_file.packed(rest, allow_pickle=not weights_only))


@errors_printable()
def load(
    life: TrainerLife, checkpoint: Any, weights_only: bool, parts: tuple[str, ...] | None, strict: bool
) -> LoadReport | None:
    """Load a file or a folder into all workers.

    Args:
        life: The trainer's workers. Parts that are not loaded are taken from their current state.
        checkpoint: Path or URI of the file or folder.
        weights_only: True to reject files whose loading could run arbitrary code.
        parts: Names of the parts of the state to load; None for all parts.
        strict: True to raise if some weights do not fit the models. False to load only the weights that fit.

    Returns:
        A report of what was loaded, if only parts were loaded, as always from a weights file. Otherwise None.
    """
    name, controller, report = files.shown(checkpoint), life.controller, None
    with ExitStack() as held:
        path = held.enter_context(files.local_copy(checkpoint))
        is_folder = divided.is_folder(path)
        is_whole = not parts and (is_folder or not weights_file.is_weights_file(path))
        if is_whole and is_folder and controller.facts[0].is_sharded:
            # Each worker reads its shards from the folder, so that no process needs the full state.
            _, rank_states, _ = _checked(controller, divided.open_folder(path, weights_only).outline(), is_file=True)
            place = StateInFolder(os.path.realpath(path), weights_only)
            load_into_all(controller, TorchRunner.restore, place, rank_states, is_complete=False)
        else:
            state = _read(path, name, weights_only, held)
            if not is_whole:
                state, report = _merged(life.snapshot(), state, parts, strict)
            load_state(controller, state, held, is_file=is_whole)
    life.saves.note_file(name)
    return report


# ------------------------------------------------------------------------------------------------ parts of a checkpoint


@dataclass(frozen=True)
class LoadReport:
    """Report of what `load` took from a file, and what did not fit.

    If the operator has several models, each weight's name starts with the model's index and a dot.

    Attributes:
        parts: Names of the parts that were loaded, such as "models".
        missing: Names of weights that the file lacks. These weights keep their values.
        unexpected: Names of weights in the file that the model lacks.
        mismatched: Names of weights whose shapes differ, with the shapes in the file and in the model. These weights
            keep their values.
        num_loaded: Number of the models' weights that were loaded, including buffers.
    """

    parts: tuple[str, ...]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: Mapping[str, tuple[Shape, Shape]] = field(default_factory=dict)
    num_loaded: int = 0

    @property
    def is_complete(self) -> bool:
        """True if no weight is missing, unexpected or mismatched. Also True if the models were not loaded."""
        return not (self.missing or self.unexpected or self.mismatched)

    def __str__(self) -> str:
        shapes = [f"{name}: {saved} in the file, {own} in the model" for name, (saved, own) in self.mismatched.items()]
        kinds = {"missing": self.missing, "unexpected": self.unexpected, "other shapes": shapes}
        told = [f"{kind}: {', '.join(names)}" for kind, names in kinds.items() if names]
        return printable_lines("; ".join([f"loaded {', '.join(self.parts)}", f"{self.num_loaded} weights", *told]))


def checked_parts(parts: Any, strict: Any) -> tuple[str, ...] | None:
    """Check the arguments `parts` and `strict` of `load`. Return the parts to load; None for the entire file.

    Parts are returned in the order of `PARTS`. Without `parts`, `strict=False` loads only the models.

    Raises:
        TypeError: `parts` is not a sequence of names.
        ValueError: A name is unknown, or `parts` is empty.
    """
    checks.refuse_text(strict=strict)
    if parts is None:
        return None if strict else _WEIGHTS
    if isinstance(parts, str) or not isinstance(parts, Iterable):
        raise TypeError(f'`parts={parts!r}`: need a tuple of names, such as `parts=("models",)`.')
    names = list(parts)
    for name in names:
        if name not in PARTS:
            guess = checks.did_you_mean(str(name), PARTS)
            raise ValueError(f"`parts` has {name!r}.{guess} Available: {', '.join(f'`{each}`' for each in PARTS)}.")
    if not names:
        raise ValueError("`parts=()`: name at least one part, or omit `parts` to load all of them.")
    return tuple(name for name in PARTS if name in names)


def _read(path: str, name: str, weights_only: bool, held: ExitStack) -> dict[str, Any]:
    """Read the state in a checkpoint file, a checkpoint folder or a weights file.

    Tensors may be memory-mapped from the file. They are then valid only while the file is open.

    Args:
        path: Path of the file or folder.
        name: Name of the file or folder to show in errors.
        weights_only: False to unpickle arbitrary objects.
        held: Exit stack to which the open file is added. Closing the stack closes the file.
    """
    if divided.is_folder(path):
        return divided.open_folder(path, weights_only).read_whole()
    if weights_file.is_weights_file(path):
        return weights_file.read(path, name)
    return held.enter_context(checkpoint_file.mapped(path, weights_only=weights_only, name=name))


def _merged(
    snapshot: Snapshot, saved: Mapping[str, Any], parts: tuple[str, ...] | None, strict: bool
) -> tuple[dict[str, Any], LoadReport]:
    """Return the trainer's state with some parts replaced by those in a file, and a report of what did not fit.

    Args:
        snapshot: Current state of the trainer.
        saved: Content of the file.
        parts: Names of the parts to take from the file; None for only the models.
        strict: True to take all weights. If some do not fit the models, loading the returned state into the workers
            raises. False to take only the weights that fit.

    Raises:
        ValueError: The file lacks a part, has a different number of models, or a model in the file is not a dict.
    """
    state: dict[str, Any] = checkpoint_file.as_in_file(divided.whole(snapshot.shared_state, copy=True))
    parts = parts or _WEIGHTS
    report = LoadReport(parts)
    for part in parts:
        if part == "models":
            left_out = _names_left_out(state)
            report = _take_models(state["models"], _part(saved, part), strict, parts, left_out)
        else:
            state.update(_taken(part, saved))
        if (REMADE in state or REMADE in saved) and (part == CRITERION or (part == "models" and strict)):
            from raysgd.torch.objects.remade import with_record_of

            state = with_record_of(state, saved, REMADE, part)
    return state, report


def _names_left_out(state: Mapping[str, Any]) -> list[Collection[str]]:
    """Return, for each model, the names of frozen weights that `state` omits because `setup` recreates them."""
    parts = state[REMADE]["parts"] if REMADE in state else ()
    return [parts[index] if index < len(parts) else () for index in range(len(state["models"]))]


def _taken(part: str, saved: Mapping[str, Any]) -> dict[str, Any]:
    if part == "progress":
        resume = {RESUME: saved[RESUME]} if RESUME in saved else {}
        return {"epoch": _part(saved, "epoch"), **resume}
    if part == "precision":
        return {name: saved[name] for name in STATE_KEYS if name in saved}
    return {part: _part(saved, part)}


def _part(saved: Mapping[str, Any], part: str) -> Any:
    if part not in saved:
        raise ValueError(f"The file has no {part!r}, so nothing was loaded. Available: {sorted(map(str, saved))}.")
    return saved[part]


def _take_models(
    own: list[Any], saved: Any, strict: bool, parts: tuple[str, ...], left_out: Sequence[Collection[str]]
) -> LoadReport:
    """Replace the models' state dicts in `own` with the saved ones. Without `strict`, replace only weights that fit.

    Return a report. With `strict`, the report lists no names, because weights that do not fit are detected later.

    Args:
        own: Current state dicts of the models, changed in place.
        saved: State dicts of the models from the file.
        strict: True to take all saved weights, even those that do not fit.
        parts: Names of the parts to list in the report.
        left_out: For each model, names of frozen weights that the current state omits because `setup` recreates them.
            If the file has these weights, the report does not list them as unexpected.
    """
    if not isinstance(saved, list | tuple) or len(saved) != len(own):
        found = len(saved) if isinstance(saved, list | tuple) else f"a `{type(saved).__name__}` instead of"
        raise ValueError(f"The file holds {found} models, but the operator registered {len(own)}. Nothing was loaded.")
    missing, unexpected, num_loaded = list[str](), list[str](), 0
    mismatched: dict[str, tuple[Shape, Shape]] = {}
    for index, (mine, theirs) in enumerate(zip(own, saved, strict=True)):
        if not isinstance(theirs, Mapping):
            raise ValueError(
                f"Model {index} in the file is a `{type(theirs).__name__}`, not a dict. Nothing was loaded."
            )
        full = weights_file.with_tied(with_plain_names(theirs), mine)
        if strict:
            own[index] = full
            num_loaded += len(full)
            continue
        of_model, fitting = f"{index}." if len(own) > 1 else "", {}
        for name, value in mine.items():
            if name not in full:
                missing.append(f"{of_model}{name}")
            elif _shape(full[name]) != _shape(value):
                mismatched[f"{of_model}{name}"] = _shape(full[name]), _shape(value)
            else:
                fitting[name] = full[name]
        unexpected += [f"{of_model}{name}" for name in full if name not in mine and name not in left_out[index]]
        mine.update(fitting)
        num_loaded += len(fitting)
    return LoadReport(parts, tuple(missing), tuple(unexpected), mismatched, num_loaded)


def _shape(value: Any) -> Shape:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()
