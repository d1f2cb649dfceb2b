"""Callbacks that measure learning rates, gradient norms, throughput, and how the workers spend their time.

`StepMetrics` averages the metrics of steps for loggers, and `ProfilerTrace` records some steps with a profiler.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from raysgd.callbacks.callback import Callback, Run
from raysgd.callbacks.worker_callback import WorkerCallback, index_of, of_optimizer, optimizers_of, rank_of
from raysgd.core import arguments as checks
from raysgd.core.numbers.meters import NUM_SAMPLES, AverageMeterCollection, MetricSummary, is_metric_object
from raysgd.core.numbers.timing import goodput_of
from raysgd.storage import open_folder

_MOST_STEPS = 2**53
_SECONDS = ("seconds", "time_this_iter_s", "_time_this_iter_s")
"""Names of the elapsed seconds in the results of epochs, in reports of `fit()`, and in reports of `Trainer.run`."""


class LearningRateMonitor(WorkerCallback):
    """Adds the learning rate of each epoch's last step to the results, as `lr`.

    With several optimizers, the names are `lr_optimizer0` and so on. With several parameter groups, they are
    `lr_group0` and so on, or `lr_NAME` for a group with a name. For `TorchTrainer`.
    """

    def __init__(self) -> None:
        self._rates: dict[str, float] = {}

    def on_gradients(self, operator: Any, optimizer: Any) -> None:
        self._rates.update(_rates_of(operator, index_of(operator, optimizer), optimizer))

    def on_epoch_end(self, operator: Any, metrics: dict[str, Any]) -> None:
        for index, optimizer in enumerate(optimizers_of(operator)):
            metrics.update(dict(_rates_of(operator, index, optimizer)))
        metrics.update(self._rates)
        self._rates = {}


def _rates_of(operator: Any, index: int, optimizer: Any) -> Iterator[tuple[str, float]]:
    groups = getattr(optimizer, "param_groups", ())
    for number, group in enumerate(groups):
        name = of_optimizer("lr", index, operator)
        ending = f"_{group.get('name', f'group{number}')}" if len(groups) > 1 else ""
        yield f"{name}{ending}", float(group["lr"])


class ThroughputMonitor(Callback):
    """Adds throughput to each epoch's results: `samples_per_s` over all workers, `batches_per_s` of one worker.

    Both are averages over the training call, including recoveries but not validation. For training functions, they are
    averages over the time since the previous report. Reports must then contain `num_samples` for `samples_per_s`, and
    `batch_count` for `batches_per_s`. With gradient accumulation, `batches_per_s` counts every batch, not only one per
    optimizer step.
    """

    def on_result(self, run: Run, result: dict[str, Any]) -> None:
        """Add the samples per second and the batches per second to the result."""
        seconds = _seconds_of(result)
        for name, counted in (("samples_per_s", "num_samples"), ("batches_per_s", "batch_count")):
            if counted in result and seconds > 0:
                result[name] = float(result[counted]) / seconds


class GoodputMonitor(Callback):
    """Adds to the results of each epoch how the workers spent their time, such as `time_useful_s` and `time_data_s`.

    It also adds `goodput`, the fraction of the time in training calls that was neither lost to failures nor spent on
    preparing for failures, for example on snapshots.

    Each `time_..._s` entry is the time that ranks spent on one activity since the previous epoch, averaged over ranks.
    Activities that took no time are left out. docs/training-runs.md explains the entries.

    For training functions, only `goodput` and `time_recovery_s` are available. Time spent on repeated steps does not
    reduce this goodput.
    """

    def on_run_begin(self, run: Run) -> None:
        self._before: dict[str, float] = {} if run.trainer is None else run.trainer.ledger().total()
        self._num_events = len(run.history.events)

    def on_result(self, run: Run, result: dict[str, Any]) -> None:
        """Add the goodput, and the seconds that each activity took, to the result."""
        if run.trainer is None:
            events, seconds = run.history.events[self._num_events :], _seconds_of(result)
            self._num_events += len(events)
            recovery = min(seconds, sum(event.seconds for event in events if event.is_failure))
            if seconds > 0:
                result.update(goodput=1.0 - recovery / seconds, time_recovery_s=recovery)
            return
        ledger = run.trainer.ledger()
        total = ledger.total()
        spent = {name: seconds - self._before.get(name, 0.0) for name, seconds in total.items()}
        self._before = total
        goodput = goodput_of(spent)
        if goodput is not None:
            result["goodput"] = goodput
        per_rank = {name: seconds / len(ledger.ranks) for name, seconds in spent.items() if seconds > 0}
        result.update({f"time_{name}_s": seconds for name, seconds in per_rank.items()})


def _seconds_of(result: Mapping[str, Any]) -> float:
    return next((float(result[name]) for name in _SECONDS if name in result), 0.0)


class GradientNorms(WorkerCallback):
    """Adds the gradient norm before clipping to the results of each epoch: `grad_norm` (mean) and `max_grad_norm`.

    The norm is computed in each optimizer step, after the gradients have been averaged over all workers. In fp16, steps
    that are skipped because gradients overflowed are left out, and `num_overflows` counts them. With several
    optimizers, the names are `grad_norm_optimizer0` and so on. For `TorchTrainer`.
    """

    def on_begin(self, operator: Any) -> None:
        # For each optimizer: the sum, the number and the maximum of the norms in this epoch, and the number of skipped
        # steps.
        self._totals: dict[int, list[Any]] = {}

    def on_gradients(self, operator: Any, optimizer: Any) -> None:
        norm, index = norm_of(operator, optimizer), index_of(operator, optimizer)
        operator._raysgd.callbacks.note_norm(norm)
        # Keep `counts` as a tensor on the device, to avoid waiting for the GPU.
        counts = norm.isfinite() | (not operator._raysgd.precision.skips_overflows)
        total, count, largest, num_overflows = self._totals.get(index, (0.0, 0, 0.0, 0))
        norm = norm.where(counts, 0.0)
        self._totals[index] = [total + norm, count + counts, norm.clamp(min=largest), num_overflows + ~counts]

    def on_epoch_end(self, operator: Any, metrics: dict[str, Any]) -> None:
        for index, (total, count, largest, num_overflows) in sorted(self._totals.items()):
            name = of_optimizer("grad_norm", index, operator)
            if count:
                metrics[name], metrics[f"max_{name}"] = float(total) / float(count), float(largest)
            if operator._raysgd.precision.skips_overflows:
                metrics[of_optimizer("num_overflows", index, operator)] = int(num_overflows)
        self._totals = {}

    def state_dict(self) -> dict[str, Any]:
        return {"totals": [[index, *map(float, entry)] for index, entry in self._totals.items()]}

    def _check_state(self, operator: Any, state: Any) -> None:
        totals = state.get("totals") if isinstance(state, Mapping) else None
        num_optimizers = len(optimizers_of(operator))
        if not isinstance(totals, list) or not all(_is_row(row, num_optimizers) for row in totals):
            raise ValueError("The state of gradient norms does not match, so nothing was loaded: it has no totals.")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._totals = {int(index): entry for index, *entry in state["totals"]}


def _is_row(row: Any, num_optimizers: int) -> bool:
    """Return True if a row in a saved state has an optimizer's index, and its four totals.

    The norms may be infinite or NaN, as in a run without a loss scale that diverges. The numbers of steps may not.
    """
    is_of_kind = isinstance(row, list) and list(map(type, row)) == [int, float, float, float, float]
    return is_of_kind and 0 <= row[0] < num_optimizers and all(0 <= row[place] <= _MOST_STEPS for place in (2, 4))


def norm_of(operator: Any, optimizer: Any) -> Any:
    """Return the norm of all gradients of an optimizer, as a one-element tensor on their device."""
    import torch

    parameters = operator._raysgd.precision.parameters(optimizer)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros(())
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm.detach()


class StepMetrics(WorkerCallback):
    """Averages this worker's metrics over several steps at a time, for callbacks that override `on_step_metrics`.

    Args:
        every: Number of steps over which metrics are averaged.

    Attributes:
        begun: None, unless the run resumes from a checkpoint. Then a pair: the checkpoint's step, and each rank's
            metrics of those steps before the checkpoint that are not part of a finished average.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self.begun: tuple[int, tuple[MetricSummary, ...]] | None = None

    def on_begin(self, operator: Any) -> None:
        self._last, self._open, self._closed = -1, operator._raysgd.new_meters(), dict[int, AverageMeterCollection]()
        if self.begun is not None and operator.global_step == self.begun[0]:
            self._last, by_rank = self.begun
            for each in by_rank[rank_of(operator) :: operator._raysgd.world.size]:
                self._open.go_on_from(each)

    def _on_leg(self, operator: Any, leg: Mapping[str, Any]) -> None:
        if self._last < 0:
            self._last = operator.global_step

    def on_step_end(self, operator: Any, step: int, metrics: Any) -> None:
        last = self._last  # with gradient accumulation, several batches before `step`
        # A step that is repeated after a failure counts only once.
        if step <= last or not isinstance(metrics, Mapping):
            return
        values = {name: value for name, value in metrics.items() if not is_metric_object(type(value))}
        num_samples = values.pop(NUM_SAMPLES, 1)
        with suppress(TypeError, ValueError):  # the user's own training loop may return an invalid `num_samples`
            self._open.update(values, num_samples, is_strict=False)
        if step // self._every > last // self._every:
            self._closed[step], self._open = self._open, operator._raysgd.new_meters()
        self._last = step

    def open(self) -> MetricSummary:
        """Return this worker's metrics of the most recent steps, which are not part of a finished average yet."""
        return self._open.summary()

    def _news(self, operator: Any, received: int) -> dict[int, MetricSummary]:
        """Return the finished averages. The key of each average is the last step that it includes.

        Args:
            operator: This worker's operator.
            received: Return the averages whose last step is later than this step. Discard the earlier averages.
        """
        for step in [step for step in list(self._closed) if step <= received]:
            del self._closed[step]
        return {step: meters.summary() for step, meters in list(self._closed.items())}


def open_steps(replica: Any) -> tuple[int, MetricSummary]:
    """Return one worker's current step, and its metrics of the most recent steps.

    These are the steps that are not part of a finished average yet.

    Args:
        replica: The object in the worker that holds the training operator.
    """
    found: StepMetrics | None = replica.operator._raysgd.callbacks.of_kind(StepMetrics)
    return replica.operator.global_step, MetricSummary() if found is None else found.open()


class ProfilerTrace(WorkerCallback):
    """Records some steps of a run with `torch.profiler` and writes `rank0.json`, `rank1.json` and so on.

    Open the files in https://ui.perfetto.dev. For `TorchTrainer`.

    Args:
        folder: Folder for the files: a folder that all workers share, or a URI such as `s3://bucket/traces`.
        steps: Steps to record, as `(first, end)`. As in `range(first, end)`, step `end` is not recorded. Each worker
            counts its own steps in this run from 0. Recording stops at the latest when the epoch ends.
        ranks: Ranks of the workers that record, or None for all ranks.

    Raises:
        ValueError, TypeError: An argument is invalid.

    Examples:
        >>> trace = ProfilerTrace("traces", steps=(10, 15))
    """

    def __init__(
        self, folder: str | Path, steps: tuple[int, int] = (1, 4), *, ranks: Iterable[int] | None = None
    ) -> None:
        self._folder = open_folder(folder, argument="folder")
        if self._folder.is_local:  # make the path absolute, because workers may have another working directory
            self._folder = open_folder(self._folder.local_path.absolute())
        self.steps = _checked_steps(steps)
        self.ranks = None if ranks is None else _checked_ranks(ranks)
        self._num_steps = 0
        self._profiler: Any = None

    def on_epoch_begin(self, operator: Any) -> None:
        self._begin_if_due(operator)

    def on_step_end(self, operator: Any, step: int, metrics: Any) -> None:
        self._num_steps += 1
        if self._num_steps >= self.steps[1]:
            self._finish(operator)
        else:
            self._begin_if_due(operator)

    def on_epoch_end(self, operator: Any, metrics: dict[str, Any]) -> None:
        self._finish(operator)

    def _begin_if_due(self, operator: Any) -> None:
        is_chosen = self.ranks is None or rank_of(operator) in self.ranks
        if self._num_steps == self.steps[0] and is_chosen and self._profiler is None:
            from torch.profiler import profile

            self._profiler = profile()
            self._profiler.start()

    def _finish(self, operator: Any) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        profiler.stop()
        with tempfile.TemporaryDirectory(prefix="raysgd-") as temporary:
            path = Path(temporary, "trace.json")
            profiler.export_chrome_trace(str(path))
            self._folder.write(f"rank{rank_of(operator)}.json", path.read_bytes())


def _checked_ranks(ranks: Any) -> frozenset[int]:
    found = list(ranks) if isinstance(ranks, Iterable) else []
    if not found or not all(checks.is_integer(rank) and rank >= 0 for rank in found):
        raise ValueError(f"`ranks={ranks!r}`: need a list of ranks, each 0 or more, such as [0, 1], or None for all.")
    return frozenset(map(int, found))


def _checked_steps(steps: Any) -> tuple[int, int]:
    is_pair = isinstance(steps, tuple | list) and len(steps) == 2 and all(map(checks.is_integer, steps))
    if not is_pair or not 0 <= steps[0] < steps[1]:
        raise ValueError(f"`steps={steps!r}`: need the first step and the one before which to end, such as (10, 15).")
    return int(steps[0]), int(steps[1])
