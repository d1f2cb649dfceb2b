"""`ProgressBar`: shows how far a run is, and one line of results for each epoch.

The driver draws; workers only count. In a terminal or a notebook it is a bar that is cleared when the call is over, and
in a log file, which a bar would fill with pages, lines only.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from raysgd._text.once import Once
from raysgd.callbacks.bars import STYLES, BarView, LineBar, Style, make_bar
from raysgd.callbacks.callback import Callback, Run
from raysgd.history import readable

if TYPE_CHECKING:
    from raysgd._numbers.call_progress import CallProgress
    from raysgd.engine.shared.group_events import GroupEvent

logger = logging.getLogger(__name__)

_PHASES = {"train": "train", "validation": "validate", "test": "test", "predict": "predict"}
_MOST_VALUES = 3


class ProgressBar(Callback):
    """Shows a run while it goes on: a bar for each call of train, validate, and predict, and a line for each epoch.

    Args:
        style: "tqdm" draws with the package of that name; "plain" writes lines only. "auto" takes tqdm if it is
            installed. Where the output is no terminal and no notebook, all styles write lines.
        metrics: Names of the metrics to show. None shows all in the lines, and the first three of a batch in the bar.
        stream: Where to draw; standard error by default.

    Raises:
        ValueError: There is no such style.
        ModuleNotFoundError: The package that the style needs is not installed.

    Examples:
        >>> trainer.fit(10, callbacks=[ProgressBar(metrics=("train_loss", "val_loss"))])  # doctest: +SKIP
    """

    def __init__(self, style: Style = "auto", metrics: Sequence[str] | None = None, stream: Any = None) -> None:
        self._metrics = _checked_names(metrics)
        self._purpose = f'`ProgressBar(style="{style}")`'
        if style not in STYLES:
            raise ValueError(f"`style={style!r}`: need one of {', '.join(map(repr, STYLES))}.")
        self._style, self._stream, self._drawn = style, stream, cast("LineBar | None", None)
        self._once = Once()
        self._num_workers: int | None = None
        self._began = time.monotonic()
        make_bar(style, stream or sys.stderr, self._purpose)  # says now what is missing

    def on_run_begin(self, run: Run) -> None:
        self._drawn, self._num_workers, self._began = None, None, time.monotonic()

    def on_progress(self, run: Run, progress: CallProgress) -> None:
        self._show(progress, self._label(run))

    def on_result(self, run: Run, result: dict[str, Any]) -> None:
        self._bar.clear()
        for name in self._metrics or ():
            if name not in result and self._once.is_first(name):
                logger.warning("`ProgressBar`: %s", readable.unknown(name, readable.metrics_of([result])))
        values = _as_text(readable.chosen(result, self._metrics))
        self._bar.row(self._label(run), {**values, **self._circumstances(result)})

    def on_event(self, run: Run, event: GroupEvent) -> None:
        self._num_workers = event.old_size

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        self._bar.clear()
        if error is None and run.epoch:
            took = readable.seconds(time.monotonic() - self._began)
            reason = run.history.stop_reason
            self._bar.line(f"stopped after {took}: {reason}" if reason else f"finished in {took}")

    @contextlib.contextmanager
    def around(self, trainer: Any) -> Iterator[ProgressBar]:
        """Shows the calls of `train`, `validate`, `test` and `predict` that you make until the end of the block.

        Args:
            trainer: A class-based trainer.

        Examples:
            >>> with ProgressBar().around(trainer):  # doctest: +SKIP
            ...     scores = trainer.predict(rows)
        """
        began: list[float] = []

        def show(progress: CallProgress) -> None:
            began.append(time.monotonic())
            self._show(progress, _label_of_call(progress))
            if progress.is_done:
                self._bar.line(self._line_of_call(progress, time.monotonic() - began[0]))
                began.clear()

        with trainer._listeners.listening(show):
            try:
                yield self
            finally:
                self._bar.clear()

    def _show(self, progress: CallProgress, label: str) -> None:
        """Draws how far a call is; one that is done is taken away."""
        if progress.is_done:
            self._bar.clear()
            return
        values = self._values(progress)
        self._bar.draw(BarView(label, _PHASES[progress.kind], progress.num_steps, progress.total, values))

    def _values(self, progress: CallProgress) -> dict[str, str]:
        metrics = readable.chosen(progress.metrics, self._metrics)
        return _as_text(dict([*metrics.items()][: self._most_values]))

    def _line_of_call(self, progress: CallProgress, took: float) -> str:
        what = f"{_label_of_call(progress)} {_PHASES[progress.kind]}".strip()
        values = [f"{name} {value}" for name, value in self._values(progress).items()]
        count = readable.counted(progress.num_steps, "batch", "batches")
        return "  ".join([what, count, *values, readable.seconds(took)])

    @property
    def _most_values(self) -> int:
        return _MOST_VALUES if self._metrics is None else len(self._metrics)

    @property
    def _bar(self) -> LineBar:
        """Made when it is first needed: by then programs have set up their streams."""
        if self._drawn is None:
            self._drawn = make_bar(self._style, self._stream or sys.stderr, self._purpose)
        return self._drawn

    def _label(self, run: Run) -> str:
        unit = "epoch" if run.trainer is not None else "report"
        width = len(str(run.epochs)) if run.epochs is not None else 0
        of = f"/{run.epochs}" if run.epochs is not None else ""
        return f"{unit} {run.epoch:>{width}}{of}"

    def _circumstances(self, result: dict[str, Any]) -> dict[str, str]:
        """Return what a row says besides its metrics: time, speed, and the number of workers when it is another one."""
        told = {}
        if readable.is_real(result.get("seconds")):
            told["time"] = readable.seconds(result["seconds"])
        speed = readable.samples_per_s(result)
        if speed is not None:
            told["throughput"] = readable.rate(speed)
        num_workers = result.get("num_workers")
        if num_workers is not None and self._num_workers not in (None, num_workers):
            told["workers"] = readable.counted(num_workers, "worker")
        self._num_workers = num_workers
        return told


def _as_text(metrics: Mapping[str, Any]) -> dict[str, str]:
    """Names and values as a terminal can show them: a name may hold anything, also what moves the cursor."""
    return {_printable(name): _printable(readable.number(value)) for name, value in metrics.items()}


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text)


def _label_of_call(progress: CallProgress) -> str:
    if progress.kind in ("predict", "test"):
        return ""
    of = f"/{progress.num_epochs}" if progress.num_epochs else ""
    return f"epoch {progress.epoch_idx + 1}{of}"


def _checked_names(metrics: Any) -> tuple[str, ...] | None:
    if metrics is None:
        return None
    if isinstance(metrics, str) or not all(isinstance(name, str) for name in metrics):
        raise TypeError(f"`metrics={metrics!r}`: need a list of names, such as `metrics=['train_loss']`.")
    return tuple(metrics)
