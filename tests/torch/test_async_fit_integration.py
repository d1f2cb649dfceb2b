"""`fit(validate="async")`: the same results as inline, an epoch later, in order, and none is left out.

Covers `raysgd.trainer.driver.fit_epoch`.
"""

from __future__ import annotations

import csv
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

from raysgd.callbacks import Callback, Checkpointing, CSVLogger, EarlyStopping, Run
from raysgd.exceptions import CallbackError
from raysgd.torch import TorchTrainer
from tests.torch.operators_for_tests import BatchNormOperator, dataset

pytestmark = pytest.mark.integration

OPTIONS = {"training_operator_cls": BatchNormOperator, "num_workers": 1, "use_gpu": False, "seed": 3}


class Plateaus(BatchNormOperator):
    """Lowers its learning rate after every epoch, as `val_loss` never pleases it."""

    def register(self, **parts: Any) -> Any:
        plateau = ReduceLROnPlateau(parts["optimizers"], factor=0.5, patience=0, threshold=0.99)
        *others, self.scheduler = super().register(**parts, schedulers=plateau)
        return others


class Held(Plateaus):
    """Validates its first epoch once a file is gone, and fails in the validation of the third."""

    def validate(self, val_iterator: Any, info: Any = None) -> Any:
        while self.epoch == 1 and Path(self.config["closed"]).exists():
            time.sleep(0.01)
        if self.epoch == 3:
            raise ZeroDivisionError("in the third epoch")
        return super().validate(val_iterator, info)

    def train_epoch(self, iterator: Any, info: Any = None, num_steps: Any = None, epoch_idx: int = 0) -> Any:
        self.epoch = epoch_idx + 1
        return super().train_epoch(iterator, info, num_steps, epoch_idx)

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.epoch = 0

    def state_dict(self) -> Any:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: Any) -> None:
        self.epoch = state["epoch"]


class Opens(Callback):
    """Lets the validation of the first epoch go on once the second one is saved, and notes what happens when."""

    def __init__(self, closed: Path, folder: Path) -> None:
        self.closed, self.folder = closed, folder
        self.order: list[str] = []

    def on_epoch_begin(self, run: Run) -> None:
        if run.epoch == 2:
            self.beside = json.loads((self.folder / "epoch_0002.ckpt.run.json").read_text())
            shutil.copy(self.folder / "epoch_0002.ckpt", self.closed)

    def on_result(self, run: Run, result: dict[str, Any]) -> None:
        self.order.append(f"result {run.epoch}")
        assert (self.folder / f"epoch_000{run.epoch}.ckpt").exists(), "it may be the best"

    def on_checkpoint(self, run: Run, checkpoint: str) -> None:
        self.order.append(f"saved {run.epoch}")
        if run.epoch == 2:
            self.closed.unlink()


class Told(Callback):
    """Notes what it is told, and fails at the beginning of an epoch."""

    def __init__(self, fails_after: int | None = None) -> None:
        self.results: list[tuple[int, int, float]] = []
        self.ends: list[int] = []
        self.fails_after = fails_after

    def on_epoch_begin(self, run: Run) -> None:
        if run.epoch == self.fails_after:
            raise RuntimeError("the power is gone")

    def on_epoch_trained(self, run: Run) -> None:
        self.ends.append(run.epoch)
        run.trainer.validate(dataset=DataLoader(dataset(7, seed=2), batch_size=4))  # type: ignore[union-attr]

    def on_result(self, run: Run, result: dict[str, Any]) -> None:
        self.results.append((run.epoch, result["epoch"], result["val_loss"]))


Make = Callable[..., TorchTrainer]


@pytest.fixture
def make(ray_cluster: None) -> Iterator[Make]:
    made = []

    def make(**options: Any) -> TorchTrainer:
        made.append(TorchTrainer(**{**OPTIONS, **options}))
        return made[-1]

    yield make
    for trainer in made:
        trainer.shutdown()


def places_in(table: Path) -> list[tuple[str | None, str | None]]:
    """The epoch and step of each row."""
    with open(table, newline="") as file:
        return [(row.get("epoch"), row.get("step")) for row in csv.DictReader(file)]


def rate(operator: Any) -> float:
    found: float = operator.optimizer.param_groups[0]["lr"]
    return found


def test_the_results_are_those_of_a_run_that_waits(make: Make, tmp_path: Path) -> None:
    kept: dict[str, Any] = {}
    for way in ("inline", "async"):
        trainer = make(spare_workers=1)
        saving = Checkpointing(tmp_path / way, metric="val_loss", mode="max", keep_last=1)
        told, table = Told(), CSVLogger(tmp_path / f"{way}.csv")
        history = trainer.fit(4, callbacks=[told, table, saving], validate=way)  # type: ignore[arg-type]
        kept[way] = history["val_loss"], told.results, history["train_loss"]
        assert told.ends == [1, 2, 3, 4]
        assert trainer.history["val_loss"] == history["val_loss"]
        assert saving.best == str(tmp_path / way / "epoch_0001.ckpt")
        assert sorted(each.name for each in (tmp_path / way).glob("*.ckpt")) == ["epoch_0001.ckpt", "epoch_0004.ckpt"]
        lines = (tmp_path / f"{way}.csv").read_text().splitlines()
        assert [line.partition(",")[0] for line in lines] == ["epoch", "1", "2", "3", "4"]
        trainer.shutdown()
    assert kept["async"][0] == pytest.approx(kept["inline"][0], rel=1e-7)
    assert kept["async"][1] == [pytest.approx(each, rel=1e-7) for each in kept["inline"][1]]
    assert kept["async"][2] == kept["inline"][2]


def test_what_goes_by_a_validation_acts_an_epoch_later(make: Make) -> None:
    trainer = make(training_operator_cls=Plateaus, scheduler_step_freq="epoch", spare_workers=1)
    history = trainer.fit(5, callbacks=[EarlyStopping("val_loss", threshold=1e9)], validate="async")
    assert len(history) == 2
    assert all(row["val_loss"] for row in history)
    assert history.stop_reason is not None
    assert trainer.apply_all_operators(rate) == [0.05 * 0.5]
    assert trainer.ledger().total().get("validation_wait", 0.0) > 0.0


def test_a_resumed_run_makes_up_for_the_validation_that_was_running(make: Make, tmp_path: Path) -> None:
    trainer, table, every = make(spare_workers=1), CSVLogger(tmp_path / "log.csv"), {"log_every_n_steps": 2}
    with pytest.raises(CallbackError, match="the power is gone"):
        trainer.fit(4, callbacks=[Told(fails_after=2), Checkpointing(tmp_path), table], validate="async", **every)
    beside = json.loads((tmp_path / "epoch_0002.ckpt.run.json").read_text())
    assert (beside["epoch"], beside["pending"]) == (2, 2)
    assert "val_loss" not in beside["history"]["rows"][-1]
    trainer.shutdown()

    expected = make().fit(4, callbacks=[CSVLogger(tmp_path / "whole.csv")], **every)["val_loss"]
    for way in ("async", "inline"):
        resumed, told = make(spare_workers=1), Told()
        saving = Checkpointing(tmp_path / "more" if way == "async" else tmp_path)
        options = {"callbacks": [told, saving, table], **every}
        history = resumed.fit(4, resume_from=tmp_path / "epoch_0002.ckpt", validate=way, **options)  # type: ignore[arg-type]
        assert history["val_loss"] == pytest.approx(expected, rel=1e-7)
        assert [epoch for _, epoch, _ in told.results] == [2, 3, 4]
        for kind in ("csv", "steps.csv"):
            assert places_in(tmp_path / f"log.{kind}") == places_in(tmp_path / f"whole.{kind}")
        resumed.shutdown()


def test_an_epoch_is_saved_when_it_was_trained_whatever_its_validation_does(make: Make, tmp_path: Path) -> None:
    closed, folder = tmp_path / "closed", tmp_path / "saved"
    closed.touch()
    opening = threading.Timer(60, partial(closed.unlink, missing_ok=True))  # else it would never end where it waits
    opening.start()
    config, opens = {"closed": str(closed)}, Opens(closed, folder)
    trainer = make(training_operator_cls=Held, config=config, scheduler_step_freq="epoch", spare_workers=1)
    saving = Checkpointing(folder, metric="val_loss", keep_last=1)
    with pytest.raises(ZeroDivisionError, match="in the third epoch"):
        trainer.fit(6, callbacks=[opens, saving], validate="async")
    opening.cancel()
    assert (opens.order[:3], opens.order[-1]) == (["saved 1", "saved 2", "result 1"], "saved 4")

    # what was saved has the result that came later
    row = opens.beside["history"]["rows"][0]
    assert row["val_loss"] == trainer.history["val_loss"][0]
    trainer.load(closed)
    assert trainer.apply_all_operators(best_of) == [pytest.approx(row["val_loss"])]


def best_of(operator: Any) -> Any:
    return operator.scheduler.best


def test_without_spares_it_is_inline_and_says_so(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make()
    assert len(trainer.fit(2, validate="async")["val_loss"]) == 2
    assert trainer.validate(blocking=False).result(90)["num_samples"] == 13
    assert caplog.text.count("spare_workers=1") == 1
    with pytest.raises(ValueError, match='"inline"'):
        trainer.fit(1, validate="later")  # type: ignore[arg-type]
