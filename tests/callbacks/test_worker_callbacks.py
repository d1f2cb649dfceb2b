"""Worker callbacks with one worker in this process; losses are in `tests/torch/test_fit_integration.py`.

Covers `raysgd.trainer.worker.worker_callbacks`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from raysgd.callbacks import WorkerCallback
from raysgd.exceptions import CallbackError, UnpicklableError, WorkerError
from raysgd.torch import TorchTrainer
from raysgd.trainer.driver.live_changes import use_worker_callbacks
from tests.torch.operators_for_tests import LinearOperator, OwnBatchOperator

Make = Callable[..., TorchTrainer]


class Mean(WorkerCallback):
    """The mean of the weights over all steps."""

    def on_begin(self, operator: Any) -> None:
        operator.begun = getattr(operator, "begun", 0) + 1
        self.total, self.count = torch.zeros_like(operator.model.weight.detach()), 0

    def on_step_end(self, operator: Any, step: int, metrics: Mapping[str, Any]) -> Mapping[str, Any]:
        self.total += operator.model.weight.detach()
        self.count += 1
        return {"step_squared": float(step**2)}

    def on_epoch_end(self, operator: Any, metrics: dict[str, Any]) -> None:
        metrics["mean_weight"] = float((self.total / self.count).sum())
        metrics["count"] = self.count

    def state_dict(self) -> Any:
        return {"total": self.total, "count": self.count}

    def load_state_dict(self, state: Any) -> None:
        self.total, self.count = state["total"], state["count"]


class NamedMean(Mean):
    """One of several."""

    def __init__(self, name: str) -> None:
        self.name = name

    def state_key(self) -> str:
        return self.name


class Norms(WorkerCallback):
    """Notes the norms of gradients when they are complete."""

    def on_epoch_begin(self, operator: Any) -> None:
        operator.norms = []

    def on_gradients(self, operator: Any, optimizer: Any) -> None:
        assert optimizer is operator.optimizer
        operator.norms.append(float(operator.model.weight.grad.norm()))


class Steps(WorkerCallback):
    """Notes the metrics of each step."""

    def on_epoch_begin(self, operator: Any) -> None:
        operator.steps = []

    def on_step_end(self, operator: Any, step: int, metrics: Mapping[str, Any]) -> None:
        operator.steps.append(dict(metrics))


class Weighs(LinearOperator):
    """Its batches count by something else than samples."""

    def forward(self, features: Any, target: Any) -> Any:
        output, loss = super().forward(features, target)
        return output, loss, 1.0 + float(target.abs().sum())


class Padding(WorkerCallback):
    """Does nothing."""


class FailsIn(WorkerCallback):
    """Raises in one of its methods."""

    def __init__(self, method: str) -> None:
        self.method = method

    def _fail(self, method: str) -> None:
        if method == self.method:
            raise KeyError("gone")

    def on_begin(self, operator: Any) -> None:
        self._fail("on_begin")

    def on_gradients(self, operator: Any, optimizer: Any) -> None:
        self._fail("on_gradients")

    def on_step_end(self, operator: Any, step: int, metrics: Mapping[str, Any]) -> None:
        self._fail("on_step_end")

    def on_epoch_end(self, operator: Any, metrics: dict[str, Any]) -> None:
        self._fail("on_epoch_end")


class TestAroundASteps:
    def test_metrics_of_callbacks_are_averaged_like_others(self, make_local: Make) -> None:
        [row] = make_local().fit(1, callbacks=[Mean(), Padding()])
        assert row["step_squared"] == pytest.approx((1 + 4 + 9 + 16 + 25) / 5)
        assert (row["last_step_squared"], row["count"]) == (25.0, 5)

    @pytest.mark.parametrize("operator_cls", [LinearOperator, OwnBatchOperator])
    def test_gradients_are_seen_before_they_are_clipped(
        self,
        operator_cls: type[LinearOperator],
        make_local: Make,
    ) -> None:
        trainer = make_local(operator_cls, clip_grad_norm=1e-3)
        trainer.fit(1, callbacks=[Norms()])
        norms = trainer.get_local_operator().norms  # type: ignore[attr-defined]
        assert len(norms) == 5
        assert min(norms) > 0.01

    def test_a_step_of_several_batches_is_one(self, make_local: Make) -> None:
        trainer = make_local(accumulate_grad_batches=2)
        [row] = trainer.fit(1, callbacks=[Mean(), Norms()])
        assert row["count"] == 3
        assert len(trainer.get_local_operator().norms) == 3  # type: ignore[attr-defined]

    @pytest.mark.parametrize(
        "options",
        [{"micro_batch_size": 3, "split_batches": True}, {"accumulate_grad_batches": 2}, {}],
        ids=["parts", "window", "plain"],
    )
    @pytest.mark.parametrize("operator_cls", [LinearOperator, Weighs])
    def test_the_metrics_of_a_step_are_those_of_all_its_batches(
        self, make_local: Make, operator_cls: Any, options: dict[str, Any]
    ) -> None:
        trainer = make_local(operator_cls, **options)
        [row] = trainer.fit(1, callbacks=[Steps()])
        steps = trainer.get_local_operator().steps  # type: ignore[attr-defined]
        assert sum(step["num_samples"] for step in steps) == row["num_samples"]
        weights = [
            step.get("batch_weight_of_train_loss", step.get("batch_weight", step["num_samples"])) for step in steps
        ]
        mean = sum(float(step["train_loss"]) * weight for step, weight in zip(steps, weights, strict=True)) / sum(
            weights
        )
        assert mean == pytest.approx(row["train_loss"], rel=1e-6)

    def test_nothing_is_left_behind(self, make_local: Make) -> None:
        trainer = make_local()
        trainer.fit(1, callbacks=[Norms(), Mean()])
        operator = trainer.get_local_operator()
        assert trainer.worker_callbacks == ()
        assert "train_batch" not in vars(operator)
        result = trainer.train()
        assert "count" not in result
        assert len(operator.norms) == 5  # type: ignore[attr-defined]

    def test_the_training_is_the_same(self, make_local: Make) -> None:
        with_callbacks, without = make_local(), make_local()
        with_callbacks.fit(2, callbacks=[Norms(), Mean()])
        without.fit(2)
        assert torch.equal(with_callbacks.get_model().weight, without.get_model().weight)


class TestTheirState:
    def test_goes_on_in_the_next_fit(self, make_local: Make) -> None:
        once, twice = make_local(), make_local()
        once.fit(4, callbacks=[Mean()])
        twice.fit(2, callbacks=[Mean()])
        twice.fit(2, callbacks=[Mean()])
        assert twice.history["mean_weight"][-1] == once.history["mean_weight"][-1]
        assert twice.history["count"] == [5, 10, 15, 20]

    def test_is_in_files_and_comes_back_whenever_it_is_loaded(
        self,
        make_local: Make,
        tmp_path: Path,
    ) -> None:
        whole, first = make_local(), make_local()
        whole.fit(3, callbacks=[Mean()])
        first.fit(2, callbacks=[Mean()])
        first.save(tmp_path / "last.pt")
        resumed, loaded = make_local(), make_local()
        resumed.fit(3, callbacks=[Mean()], resume_from=tmp_path / "last.pt")
        loaded.load(tmp_path / "last.pt")
        loaded.fit(1, callbacks=[Mean()])
        last = whole.history["mean_weight"][-1]
        assert resumed.history["mean_weight"] == loaded.history["mean_weight"] == [last]

    def test_is_in_no_file_where_there_were_no_callbacks(self, make_local: Make) -> None:
        trainer = make_local()
        trainer.fit(1)
        assert "callbacks" not in trainer.state_dict()

    def test_begins_again_where_a_state_has_none(self, make_local: Make, tmp_path: Path) -> None:
        first, second = make_local(), make_local()
        first.fit(1)
        first.save(tmp_path / "without.pt")
        history = second.fit(2, callbacks=[Mean()], resume_from=tmp_path / "without.pt")
        assert second.get_local_operator().begun == 2  # type: ignore[attr-defined]
        assert history["count"] == [5]

    def test_of_another_form_is_refused(self, make_local: Make) -> None:
        trainer = make_local()
        state = {**trainer.state_dict(), "callbacks": [3]}
        with pytest.raises(ValueError, match=r"'callbacks' does not have the states of callbacks\. Nothing was loaded"):
            trainer.load_state_dict(state)

    def test_goes_by_name_and_its_absence_is_logged(
        self, make_local: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        first, second = make_local(), make_local()
        first.fit(1, callbacks=[NamedMean("left"), NamedMean("right")])
        first.save(tmp_path / "last.pt")
        history = second.fit(2, callbacks=[NamedMean("middle")], resume_from=tmp_path / "last.pt")
        assert history["count"] == [5]
        assert "no part for the callback `middle`, which begins again; it has one for `left`, `right`" in caplog.text

    def test_is_gone_with_another_config(self, make_local: Make) -> None:
        trainer = make_local()
        trainer.fit(1, callbacks=[Mean()])
        trainer.reset_config({})
        assert trainer.fit(1, callbacks=[Mean()])["count"] == [5]


def test_an_epoch_that_returns_no_metrics_ends_too(make_local: Make) -> None:
    class Silent(LinearOperator):
        def train_epoch(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
            super().train_epoch(*args, **kwargs)

    class Counts(WorkerCallback):
        num_epochs = 0

        def on_epoch_end(self, operator: Any, metrics: dict[str, Any]) -> None:
            self.num_epochs += 1

        def state_dict(self) -> Any:
            return self.num_epochs

    trainer = make_local(Silent)
    use_worker_callbacks(trainer._life, [Counts()])
    assert trainer.train(reduce_results=False) == [None]
    assert [*trainer.state_dict()["callbacks"].values()] == [1]


class TestFaults:
    @pytest.mark.parametrize("method", ["on_begin", "on_gradients", "on_step_end", "on_epoch_end"])
    def test_name_the_callback_and_the_method(self, method: str, make_local: Make) -> None:
        trainer = make_local()
        with pytest.raises(CallbackError, match=f"`FailsIn` failed in `{method}`: KeyError: 'gone'") as info:
            trainer.fit(1, callbacks=[FailsIn(method)])
        assert isinstance(info.value, WorkerError)
        assert trainer.worker_callbacks == ()
        assert len(trainer.fit(1)) == 1

    def test_in_the_beginning_leave_the_callbacks_of_before(self, make_local: Make) -> None:
        class Refuses(WorkerCallback):
            def on_begin(self, operator: Any) -> None:
                raise ValueError("no room")

        trainer = make_local(LinearOperator)
        use_worker_callbacks(trainer._life, [Mean()])
        installed = trainer._life.settings.worker_callbacks
        with pytest.raises(WorkerError, match="no room"):
            use_worker_callbacks(trainer._life, [NamedMean("other"), Refuses()])
        assert trainer._life.settings.worker_callbacks is installed
        assert "mean_weight" in trainer.train()

    def test_in_the_beginning_leave_none_where_there_were_none(self, make_local: Make) -> None:
        trainer = make_local()
        with pytest.raises(CallbackError, match="gone"):
            use_worker_callbacks(trainer._life, [Mean(), FailsIn("on_begin")])
        assert not trainer.get_local_operator()._raysgd.callbacks.are_there
        assert "mean_weight" not in trainer.train()

    def test_what_cannot_be_sent_is_named(self, make_local: Make) -> None:
        class Holds(Padding):
            def __init__(self) -> None:
                self.lock = threading.Lock()

        with pytest.raises(UnpicklableError, match=r"`Holds` runs in the workers, and cannot be pickled"):
            make_local().fit(1, callbacks=[Holds()])
