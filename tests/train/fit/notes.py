"""Small parts for tests of what a run of `fit()` writes down."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from raysgd.air.checkpoint import Checkpoint
from raysgd.air.config import RunConfig
from raysgd.air.trial import TrialFolder, checkpoint_name, new_trial_folder
from raysgd.train.fit.recorder import Recorder

CONFIG = {"train_loop_config": {"lr": 0.1}}


def make_folder(place: Path | str, name: str = "run") -> TrialFolder:
    return new_trial_folder(RunConfig(name=name, storage_path=place), "TorchTrainer")


def make_recorder(folder: TrialFolder, **options: Any) -> Recorder:
    return Recorder(folder, CONFIG, RunConfig(**options))


def begun_recorder(folder: TrialFolder, **options: Any) -> Recorder:
    """One whose first attempt has begun."""
    recorder = make_recorder(folder, **options)
    recorder.begin_attempt()
    return recorder


def save(folder: TrialFolder, index: int) -> Checkpoint:
    """What workers and the driver do before a report with a checkpoint is recorded."""
    name = checkpoint_name(index)
    folder.trial.staged(name).write("state", str(index).encode())
    return Checkpoint(folder.trial.commit(name))  # type: ignore[arg-type]


def lines_in(folder: Path) -> list[dict[str, Any]]:
    """The reports in `result.json`."""
    return [json.loads(line) for line in (folder / "result.json").read_text().splitlines()]


def lines(folder: TrialFolder) -> list[dict[str, Any]]:
    """Those of a trial."""
    return lines_in(folder.local_path)


def events(folder: Path) -> Iterator[tuple[str, int, Any]]:
    """Name, step and value of the numbers in TensorBoard's files; of anything else its kind."""
    from tensorboardX.proto import event_pb2

    for path in folder.glob("events.out.tfevents.*"):
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            event = event_pb2.Event.FromString(content[12 : 12 + length])
            content = content[length + 16 :]
            for value in event.summary.value:
                kind = value.WhichOneof("value")
                yield value.tag, event.step, value.simple_value if kind == "simple_value" else kind


class Noting:
    """Notes the calls of some hooks, and raises in one of them if it is to."""

    def __init__(self, fails_in: str = "") -> None:
        self.calls: list[str] = []
        self._fails_in = fails_in

    def _note(self, hook: str, text: str = "") -> None:
        self.calls.append(f"{hook} {text}".strip())
        if hook == self._fails_in:
            raise ZeroDivisionError("by mistake")

    def setup(self, stop: Any = None, num_samples: int = 0, **info: Any) -> None:
        self._note("setup", f"{num_samples} {stop}")

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._note("on_trial_start", trial.status)

    def on_trial_restore(self, trial: Any, **info: Any) -> None:
        self._note("on_trial_restore", Path(trial.checkpoint.path).name)

    def on_trial_recover(self, trial: Any, **info: Any) -> None:
        self._note("on_trial_recover", str(trial.num_failures))

    def on_step_begin(self, iteration: int, trials: list[Any], **info: Any) -> None:
        self._note("on_step_begin", str(iteration))

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        self._note("on_step_end", str(iteration))

    def on_trial_result(self, iteration: int, trials: list[Any], trial: Any, result: Any, **info: Any) -> None:
        self._note("on_trial_result", f"{result['loss']} after {trial.last_result.get('loss')}")

    def on_checkpoint(self, trial: Any, checkpoint: Any, **info: Any) -> None:
        self._note("on_checkpoint", f"{Path(checkpoint.path).name} {trial.has_checkpoint()}")

    def on_trial_save(self, trial: Any, **info: Any) -> None:
        self._note("on_trial_save", Path(trial.checkpoint.path).name)

    def on_trial_complete(self, trial: Any, **info: Any) -> None:
        self._note("on_trial_complete", trial.status)

    def on_trial_error(self, trial: Any, **info: Any) -> None:
        self._note("on_trial_error", trial.status)

    def on_experiment_end(self, trials: list[Any], **info: Any) -> None:
        self._note("on_experiment_end")
