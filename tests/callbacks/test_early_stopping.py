from __future__ import annotations

import json
import math
from typing import Any

import pytest

from raysgd.callbacks import Callback, CSVLogger, EarlyStopping, Run
from raysgd.callbacks.calling import CallbackCalls


def play(stopping: EarlyStopping, *values: float | None, run: Run | None = None) -> Run:
    """Gives it one result an epoch, until it stops the run; None for an epoch without validation."""
    run = run or Run(name="run")
    stopping.on_run_begin(run)
    for value in values:
        run.epoch += 1
        row = run.history.add_row({"train_loss": 1.0} | ({"val_loss": value} if value is not None else {}))
        stopping.on_result(run, row)
        if run.is_stopping:
            break
    stopping.on_run_end(run, None)
    return run


@pytest.mark.parametrize(
    ("options", "values", "epoch"),
    [
        ({"patience": 2}, [3, 2, 2, 2, 1], 4),
        ({"patience": 2}, [3, 2, 2.5, 1, 2, 3], 6),
        ({"patience": 2, "min_delta": 0.5}, [3, 2.6, 2.5, 1], 3),
        ({"patience": 2, "mode": "max"}, [1, 2, 3, 3, 3], 5),
        ({"patience": 1}, [3, None, None, 2, None, 2], 6),
        ({"patience": 9}, [3, math.nan], 2),
        ({"patience": 2, "check_finite": False}, [math.nan, math.nan, 1], 2),
        ({"patience": 2, "check_finite": False}, [3, math.nan, 2, math.inf, 2], 5),
        ({"threshold": 0.5}, [3, 0.6, 0.5], 3),
        ({"threshold": 2.5, "mode": "max"}, [1, 2, 2.6], 3),
        ({"threshold": 0.5, "patience": 2, "check_finite": False}, [3, math.nan, 0.6, 0.4], 4),
    ],
)
def test_when_it_stops(options: dict[str, Any], values: list[float | None], epoch: int) -> None:
    run = play(EarlyStopping("val_loss", **options), *values)
    assert (run.epoch, run.is_stopping) == (epoch, True)


def test_the_reason_says_what_was_best() -> None:
    run = play(EarlyStopping("val_loss", patience=1), 3.0, 2.0, 4.0)
    assert run.history.stop_reason == "no improvement of `val_loss` for 1 results; the best one was 2 in epoch 2"


def test_a_run_that_resumes_goes_on_counting() -> None:
    first = EarlyStopping("val_loss", patience=3)
    run = play(first, 1.0, 2.0, 2.0)
    later = EarlyStopping("val_loss", patience=3)
    later.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert play(later, 2.0, run=run).is_stopping
    assert (later.best, later.best_epoch) == (1.0, 1)


@pytest.mark.parametrize(
    ("options", "values", "stops"),
    [
        ({"patience": 2}, [1.0, 2.0, 2.0], True),
        ({"patience": 2}, [1.0, 2.0], False),
        ({"threshold": 0.5}, [1.0, 0.4], True),
        ({}, [1.0, math.nan], True),
        ({"patience": 2, "longer": 3}, [1.0, 2.0, 2.0], False),
    ],
)
def test_a_run_that_resumes_where_it_was_stopped_stops_at_once(
    options: dict[str, Any], values: list[float], stops: bool, caplog: pytest.LogCaptureFixture
) -> None:
    longer = options.pop("longer", options.get("patience", 3))
    first, later = EarlyStopping(**options), EarlyStopping(**{**options, "patience": longer})
    former = play(first, *values).history
    later.load_state_dict(json.loads(json.dumps(first.state_dict())))
    run = Run(name="run")
    run.history.take_over(former)
    run.epoch = len(values)
    later.on_run_begin(run)
    assert run.is_stopping == stops
    if stops:
        assert run.history.stop_reason == former.stop_reason
        later.on_run_end(run, None)
    assert caplog.records == []


def test_the_mode_follows_the_name(caplog: pytest.LogCaptureFixture) -> None:
    assert not play(EarlyStopping("val_loss", patience=1), 3.0, 2.0).is_stopping
    for metric, better in (("val_accuracy", 0.9), ("val_loss", 0.1)):
        stopping, run = EarlyStopping(metric, patience=1), Run(name="run")
        for run.epoch, value in enumerate([0.5, better], start=1):
            stopping.on_result(run, {metric: value})
        assert (run.is_stopping, stopping.best) == (False, better)
    assert caplog.records == []
    EarlyStopping("val_score", "min")
    assert caplog.records == []
    EarlyStopping("val_score")
    [message] = [record.getMessage() for record in caplog.records]
    assert message.startswith("`EarlyStopping(metric='val_score')`: the name does not say which values are best, so lo")


def test_a_second_run_counts_from_the_beginning() -> None:
    stopping = EarlyStopping("val_loss", patience=2)
    assert play(stopping, 1, 1, 1).is_stopping
    assert not play(stopping, 5, 4).is_stopping


def test_an_unknown_metric_is_an_error_with_a_guess() -> None:
    run = Run(name="run")
    with pytest.raises(ValueError, match="no such metric") as error:
        EarlyStopping("val_los").on_result(run, {"val_loss": 1.0, "last_val_loss": 1.0, "note": "text"})
    assert str(error.value).endswith("Did you mean `val_loss`? There are val_loss.")
    with pytest.raises(ValueError, match="its value is 'text'; need a number"):
        EarlyStopping("note").on_result(run, {"note": "text"})


def test_a_metric_of_validation_is_missed_once_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    stopping = EarlyStopping("val_loss")
    play(stopping, 1.0)
    assert caplog.text == ""
    assert not play(stopping, None, None).is_stopping
    assert [record.getMessage()[:43] for record in caplog.records] == ["EarlyStopping: no epoch had `val_loss`, bec"]


class TestInARunThatIsNeverValidated:
    def test_a_metric_of_validation_is_refused(self) -> None:
        stopping = EarlyStopping("val_loss")
        run = Run(name="line", callbacks=[stopping, CSVLogger()], may_validate=False)
        with pytest.raises(ValueError, match=r"`EarlyStopping\(metric='val_loss'\)` with `validation_freq=0`"):
            CallbackCalls(run.callbacks, run).check()

    def test_another_metric_is_not(self) -> None:
        run = Run(name="line", callbacks=[EarlyStopping("train_loss")], may_validate=False)
        CallbackCalls(run.callbacks, run).check()

    def test_a_callback_of_the_user_may_validate(self) -> None:
        class Validates(Callback):
            def on_result(self, run: Run, result: dict[str, Any]) -> None:
                result["val_loss"] = 1.0

        run = Run(name="line", callbacks=[Validates(), EarlyStopping("val_loss")], may_validate=False)
        CallbackCalls(run.callbacks, run).check()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"metric": ""}, TypeError, "need the name of a metric"),
        ({"mode": "best"}, ValueError, r"`EarlyStopping\(mode='best'\)`: allowed are"),
        ({"patience": 0}, ValueError, "`patience=0`"),
        ({"min_delta": -1}, ValueError, "`min_delta=-1`"),
        ({"threshold": "low"}, ValueError, "`threshold='low'`"),
        ({"check_finite": "no"}, ValueError, "True or False"),
    ],
)
def test_bad_arguments(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        EarlyStopping(**options)
