"""`TorchFramework`: what the driver of a `TorchTrainer` does differently from a `TFTrainer`'s."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from raysgd.callbacks.progress import LineBar, make_bar
from raysgd.core.arrays.user_data import CallData, goes_to_all
from raysgd.core.connections.torch import TorchConnection, variables_of_nccl
from raysgd.core.engine.snapshots import Snapshot
from raysgd.core.history.history import Kind
from raysgd.core.imports import require
from raysgd.core.numbers.results import CallProgress
from raysgd.exceptions import UnevenStepsError
from raysgd.streams.source import check_stream_of_call
from raysgd.streams.stream import Stream
from raysgd.torch import constants
from raysgd.torch.checkpoints import divided_state
from raysgd.torch.data import call_data
from raysgd.torch.driver import arguments, saving
from raysgd.torch.operator.settings import TorchSettings
from raysgd.torch.step import schedulers
from raysgd.torch.torch_runner import TorchRunner
from raysgd.trainer.configuration import GroupSettings
from raysgd.trainer.driver.life import Framework, TrainerLife
from raysgd.trainer.driver.saving import Content
from raysgd.trainer.messages.comparison import REASONS_OF_TORCH, check_equal, difference
from raysgd.trainer.messages.epochs import EpochAnswer
from raysgd.trainer.messages.prediction import BatchRequest, Found
from raysgd.trainer.worker.replica_state import place_in
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
    leaves_epochs = runs_worker_callbacks = True

    def __init__(self, group: GroupSettings, settings: TorchSettings) -> None:
        timeouts = {"timeout_s": group.timeout_s, "form_timeout_s": group.recovery.form_timeout_s}
        if group.backend == "horovod":
            from raysgd.core.connections.horovod import HorovodConnection

            self.connection = HorovodConnection(**timeouts)
        else:
            joins_alone, variables = settings.may_grow, variables_of_nccl()
            self.connection = TorchConnection(group.backend, joins_alone, variables, **timeouts)
        self._shows_progress = settings.use_tqdm
        self.reservation_timeout_s = constants.SGD_PLACEMENT_GROUP_TIMEOUT_S
        self.keeps_survivors, self.renews_survivors = settings.keeps_survivors, settings.strategy == "fsdp"

    def check_config(self, life: TrainerLife, config: Mapping[str, Any] | None) -> dict[str, Any]:
        checked = super().check_config(life, config)
        arguments.check_batch_size(replace(life.settings, config=checked), life.group_settings.num_workers)
        return checked

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
        warn_of_nothing(kind, answers, num_steps)

    def after_evaluation(self, life: TrainerLife) -> None:
        # Evaluation may have changed the states of the workers' random number generators. `save` must write the new
        # states, which the newest snapshot lacks.
        life.controller.snapshots.touch_ranks()

    def after_validation(self, life: TrainerLife, trained: Mapping[str, Any], validated: Mapping[str, Any]) -> bool:
        metrics = life.facts.plateau_metrics
        values = schedulers.values_after_validation(metrics, trained, validated) if metrics else None
        if values:
            step_schedulers(life, TorchRunner.step_plateaus, values)
        return bool(values)

    def to_predict(self, data: Any, asked: BatchRequest) -> Found:
        return call_data.source_to_predict(data, asked)

    def content_of(self, snapshot: Snapshot) -> Content:
        return saving.content_of(snapshot, True, "torch")

    def place_in(self, snapshot: Snapshot) -> tuple[int, int]:
        return place_in(divided_state.outline(snapshot.shared_state))

    def load_state(self, life: TrainerLife, state: dict[str, Any]) -> None:
        saving.load_state(life.controller, state)

    def load_snapshot(self, life: TrainerLife, snapshot: Snapshot) -> None:
        saving.load_snapshot(life.controller, snapshot)


def step_schedulers(life: TrainerLife, function: Callable[..., Any], value: Any) -> None:
    """Call `function`, which steps schedulers, on all workers with the same `value`."""
    life.on_all(function, value, changes_state=True, keeps_alike=True)


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


def warn_of_nothing(name: str, answers: Sequence[EpochAnswer], num_steps: int | None) -> None:
    """Warn if no worker got a batch, for example because the data is empty.

    Args:
        name: Name of the data in the warning: "train" or "validation".
        answers: The workers' results.
        num_steps: Number of steps that the user requested; None for the whole epoch. With 0, there is no warning.
    """
    counts = {answer.metrics.get(BATCH_COUNT) for answer in answers if answer.metrics is not None}
    if num_steps != 0 and counts == {0}:
        logger.warning(
            "the %s data has no batches: it is empty, or `drop_last` removed its only batch, or it is an iterator "
            "that was already exhausted",
            name,
        )
