from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.utils.data import DataLoader

from raysgd.callbacks import (
    Callback,
    GoodputMonitor,
    GradientNorms,
    LearningRateMonitor,
    ProfilerTrace,
    Run,
    ThroughputMonitor,
    WorkerCallback,
)
from raysgd.callbacks.calling import CallbackCalls
from raysgd.callbacks.monitors import StepMetrics
from raysgd.core.engine.shared.interface import GroupEvent
from raysgd.core.numbers.meters import AverageMeterCollection, MetricSummary
from raysgd.exceptions import WorkersLostError
from raysgd.torch import TorchTrainer, TrainingOperator
from raysgd.trainer.driver.fit_epoch import StepMetricsMerger, StepReports
from raysgd.trainer.driver.live_changes import use_worker_callbacks
from raysgd.trainer.messages.epochs import open_steps_from_data
from tests.torch.operators_for_tests import LinearOperator, OwnBatchOperator, equal

Make = Callable[..., TorchTrainer]


class Grouped(TrainingOperator):
    """Two optimizers, one of which has two groups and a schedule."""

    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(0)
        models = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)]
        groups = [{"params": [models[0].weight], "lr": 1.0}, {"params": [models[0].bias], "lr": 0.1, "name": "bias"}]
        first, second = torch.optim.SGD(groups), torch.optim.SGD(models[1].parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(first, step_size=1, gamma=0.5)
        self.models, self.optimizers, self.scheduler = self.register(
            models=models, optimizers=[first, second], schedulers=schedule
        )
        self.model = self.models[0]
        self.register_data(train_loader=DataLoader(torch.ones(8, 2), batch_size=2))

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        loss = self.models[1](self.models[0](batch)).square().mean()
        self.backward(loss, optimizer=self.optimizers)
        self.optimizer_step(self.optimizers)
        return {"train_loss": loss.detach(), "num_samples": len(batch)}


def test_each_optimizer_and_group_has_a_name(make_local: Make) -> None:
    trainer = make_local(Grouped, scheduler_step_freq="epoch")
    first, second = trainer.fit(2, callbacks=[LearningRateMonitor(), GradientNorms()])
    names = ("lr_optimizer0_group0", "lr_optimizer0_bias", "lr_optimizer1")
    assert [first[name] for name in names] == pytest.approx([1.0, 0.1, 0.01])
    assert [second[name] for name in names] == pytest.approx([0.5, 0.05, 0.01])
    assert first["grad_norm_optimizer0"] != first["grad_norm_optimizer1"] > 0


def test_one_group_has_the_plain_name(make_local: Make) -> None:
    history = make_local(config={"lr": 0.05}).fit(2, callbacks=[LearningRateMonitor()])
    assert history["lr"] == [0.05, 0.05]


class TestGradientNorms:
    def expected(self, make_local: Make) -> list[float]:
        norms = []

        class Noting(LinearOperator):
            def optimizer_step(self, optimizer: Any = None) -> None:
                norms.append(float(torch.nn.utils.get_total_norm([each.grad for each in self.model.parameters()])))
                super().optimizer_step(optimizer)

        make_local(Noting).train()
        return norms

    @pytest.mark.parametrize("options", [{}, {"clip_grad_norm": 0.01}])
    def test_are_those_before_clipping(self, make_local: Make, options: dict[str, Any]) -> None:
        [row] = make_local(**options).fit(1, callbacks=[GradientNorms()])
        first = self.expected(make_local)[0]
        assert row["max_grad_norm"] >= row["grad_norm"] > 0.1
        if not options:
            norms = self.expected(make_local)
            assert row["grad_norm"] == pytest.approx(sum(norms) / len(norms), abs=1e-6)
            assert row["max_grad_norm"] == pytest.approx(max(norms), abs=1e-6)
        else:
            assert row["max_grad_norm"] >= first - 1e-6

    def test_of_a_loop_that_steps_by_itself(self, make_local: Make) -> None:
        [own] = make_local(OwnBatchOperator).fit(1, callbacks=[GradientNorms()])
        [stock] = make_local().fit(1, callbacks=[GradientNorms()])
        assert own["grad_norm"] == pytest.approx(stock["grad_norm"], abs=1e-6)

    def test_leave_out_steps_that_fp16_leaves_out_and_count_them(self, make_local: Make) -> None:
        class Overflows(LinearOperator):
            def forward(self, features: Any, target: Any) -> Any:
                output, loss = super().forward(features, target)
                return output, loss * (float("inf") if self.global_step in self.config["at"] else 1.0)

        def fit(precision: str, *at: int) -> dict[str, Any]:
            [row] = make_local(Overflows, precision=precision, config={"at": at}).fit(1, callbacks=[GradientNorms()])
            return row

        usual, once, always = fit("fp16"), fit("fp16", 4), fit("fp16", *range(5))
        assert 0 < usual["num_overflows"] < 4, "the first scale is too large"
        assert (once["num_overflows"], always["num_overflows"]) == (usual["num_overflows"] + 1, 5)
        assert 0.1 < once["grad_norm"] <= once["max_grad_norm"] < 100
        assert "grad_norm" not in always
        broken = fit("fp32", 2)
        assert (math.isnan(broken["grad_norm"]), "num_overflows" in broken) == (True, False)

    @pytest.mark.parametrize(
        "row",
        [
            [math.nan, 0, 0, 0, 0],
            [0.0, 0, 0, 0, 0],
            [1, 0, 0, 0, 0],
            [0, 10**400, 0, 0, 0],
            [0, 0, math.nan, 0, 0],
            [0, 0, 0, 0, math.nan],
        ],
    )
    def test_a_damaged_state_is_refused_before_anything_is_loaded(self, make_local: Make, row: list[Any]) -> None:
        trainer = make_local()
        trainer.fit(1, callbacks=[GradientNorms()])
        state = trainer.state_dict()
        state["models"][0] = {name: each + 1 for name, each in state["models"][0].items()}
        use_worker_callbacks(trainer._life, [norms := GradientNorms()])
        before = trainer.state_dict()
        state["callbacks"] = {norms.state_key(): {"totals": [row]}}
        with pytest.raises(ValueError, match="The state of gradient norms does not match, so nothing was loaded"):
            trainer.load_state_dict(state)
        assert equal(trainer.state_dict(), before)

    def test_norms_of_a_run_that_diverges_are_loaded(self, make_local: Make) -> None:
        trainer = make_local()
        use_worker_callbacks(trainer._life, [norms := GradientNorms()])
        state = {
            **trainer.state_dict(),
            "callbacks": {norms.state_key(): {"totals": [[0, math.nan, 2.0, math.inf, 0.0]]}},
        }
        trainer.load_state_dict(state)
        assert math.isnan(trainer.train()["grad_norm"])

    def test_each_epoch_has_its_own(self, make_local: Make) -> None:
        first, second = make_local().fit(2, callbacks=[GradientNorms()])
        assert second["grad_norm"] < first["grad_norm"]


class TestGoodput:
    def test_each_epoch_has_its_own_time(self, make_local: Make) -> None:
        trainer = make_local()
        first, second = trainer.fit(2, callbacks=[GoodputMonitor()])
        total = trainer.ledger().total()
        assert first["time_useful_s"] > 0
        assert ["time_start_up_s" in row for row in (first, second)] == [True, False]
        assert first["time_useful_s"] + second["time_useful_s"] == pytest.approx(total["useful"])
        assert 0 < second["goodput"] <= 1

    def test_of_functions_only_recoveries_are_known(self) -> None:
        run, monitor = Run(name="function"), GoodputMonitor()
        monitor.on_run_begin(run)
        run.history.events.append(GroupEvent("continued", 2, 2, 1.0, "lost rank 1"))
        for goodput, recovery_s in ((0.75, 1.0), (1.0, 0.0)):
            result = {"loss": 1.0, "time_this_iter_s": 4.0}
            monitor.on_result(run, result)
            assert (result["goodput"], result["time_recovery_s"]) == (goodput, recovery_s)


class TestThroughput:
    def test_of_epochs_is_that_of_the_training_call(self, make_local: Make) -> None:
        [row] = make_local().fit(1, callbacks=[ThroughputMonitor()])
        assert row["samples_per_s"] * row["seconds"] == pytest.approx(20)
        assert row["batches_per_s"] * row["seconds"] == pytest.approx(5)

    @pytest.mark.parametrize("name", ["time_this_iter_s", "_time_this_iter_s"])
    def test_of_functions_is_that_of_the_time_between_reports(self, name: str) -> None:
        result = {"num_samples": 8, "loss": 1.0, name: 0.5}
        ThroughputMonitor().on_result(Run(name="function"), result)
        assert result["samples_per_s"] == 16
        assert "batches_per_s" not in result

    def test_needs_something_to_count(self) -> None:
        for result in ({"loss": 1.0}, {"num_samples": 8}, {"num_samples": 8, "seconds": 0.0}):
            before = dict(result)
            ThroughputMonitor().on_result(Run(name="function"), result)
            assert result == before


def steps_in(path: Path) -> int:
    """How many times the optimizer stepped in a trace."""
    names = [event.get("name", "") for event in json.loads(path.read_text())["traceEvents"]]
    return sum(name.startswith("Optimizer.step#") for name in names)


@pytest.mark.parametrize(("steps", "expected"), [((1, 4), 3), ((0, 1), 1), ((3, 99), 2), ((6, 8), 2)])
def test_the_steps_of_a_trace(
    make_local: Callable[..., TorchTrainer], tmp_path: Path, steps: tuple[int, int], expected: int
) -> None:
    make_local().fit(2, callbacks=[ProfilerTrace(tmp_path, steps)])
    assert [path.name for path in tmp_path.iterdir()] == ["rank0.json"]
    assert steps_in(tmp_path / "rank0.json") == expected


def test_ranks_are_chosen(make_local: Callable[..., TorchTrainer], tmp_path: Path) -> None:
    make_local().fit(1, callbacks=[ProfilerTrace(tmp_path, ranks=[1])])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ranks", [[-1], ["0"], [True], [], "0", 0])
def test_ranks_are_a_list_of_numbers(ranks: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`ranks=.*need a list of ranks"):
        ProfilerTrace(tmp_path, ranks=ranks)


@pytest.mark.parametrize("steps", [(3, 3), (-1, 2), 5, (1, 2, 3), ("a", "b")])
def test_steps_are_a_pair(steps: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`steps="):
        ProfilerTrace(tmp_path, steps)


class Steps(Callback):
    """Keeps what it is told of steps."""

    def __init__(self) -> None:
        self.told: list[tuple[int, float]] = []

    def on_step_metrics(self, run: Run, step: int, metrics: dict[str, float]) -> None:
        self.told.append((step, metrics["train_loss"]))


class Batches(WorkerCallback):
    """Keeps what single batches reported."""

    def on_step_end(self, operator: Any, step: int, metrics: Any) -> None:
        operator.reported = [*getattr(operator, "reported", ()), float(metrics["train_loss"])]


class TestSteps:
    @pytest.mark.parametrize("operator_cls", [LinearOperator, OwnBatchOperator])
    def test_are_told_as_means_over_so_many_also_across_epochs(
        self, operator_cls: type[TrainingOperator], make_local: Make
    ) -> None:
        trainer, steps = make_local(operator_cls), Steps()
        trainer.fit(2, callbacks=[Batches(), steps], log_every_n_steps=4)
        reported = trainer.get_local_operator().reported  # type: ignore[attr-defined]
        assert steps.told == [(4, pytest.approx(sum(reported[:4]) / 4)), (8, pytest.approx(sum(reported[4:8]) / 4))]

    def test_are_measured_only_where_a_callback_wants_them(self, make_local: Make) -> None:
        seen: list[bool] = []

        class Looks(Callback):
            def on_epoch_trained(self, run: Run) -> None:
                assert run.trainer is not None
                seen.append(run.trainer.get_local_operator()._raysgd.callbacks.are_there)

        for callbacks, every in (([], 1), ([Steps()], 0), ([Steps()], 1)):
            make_local().fit(1, callbacks=[Looks(), *callbacks], log_every_n_steps=every)
        assert seen == [False, False, True]

    def test_that_are_repeated_count_once(self) -> None:
        measured = StepMetrics(2)
        operator = SimpleNamespace(_raysgd=SimpleNamespace(new_meters=AverageMeterCollection), global_step=6)
        measured.on_begin(operator)
        measured._on_leg(operator, {})
        for step, value in ((7, 1.0), (8, 2.0), (9, 3.0), (8, 90.0), (9, 90.0), (10, 5.0), (12, 6.0), (13, 7.0)):
            measured.on_step_end(operator, step, {"a": value, "num_samples": 2, "text": "x", "b": 1.0})
        assert {step: row["a"] for step, row in measured._news(operator, 0).items()} == {8: 1.5, 10: 4.0, 12: 6.0}
        assert [*measured._news(operator, 10)] == [12]

    def test_of_a_run_that_resumes_end_at_the_same_steps_with_several_batches_in_a_step(self) -> None:
        """A run with three batches in a step, whose open means are not in its file, because all workers had died."""
        measured = StepMetrics(7)
        operator = SimpleNamespace(_raysgd=SimpleNamespace(new_meters=AverageMeterCollection), global_step=20)
        measured.on_begin(operator)
        for step in (23, 26, 29):
            measured._on_leg(operator, {})  # the group has changed
            measured.on_step_end(operator, step, {"a": 1.0, "num_samples": 2})
            operator.global_step = step
        assert [*measured._news(operator, 0)] == [23, 29]

    def test_are_means_over_the_ranks_that_counted_samples_and_none_is_told_twice_or_too_early(self) -> None:
        told = list[tuple[int, dict[str, float]]]()
        merger = StepMetricsMerger(lambda step, metrics: told.append((step, metrics)))
        merger.receive([{}, {}], None, is_done=False)
        assert (told, merger.received) == ([], 0)
        merger.receive([{2: means(1.0, 6), 4: means(3.0, 2)}, {2: means(5.0, 2)}], None, is_done=False)
        assert (told, merger.received) == ([(2, {"a": 2.0})], 2)
        last = [{4: means(3.0, 2), 6: means(1.0, 2)}, {2: means(5.0, 2), 4: means(math.nan, 0)}]
        merger.receive(last, None, is_done=True)
        assert (told[1:], merger.received) == ([(4, {"a": 3.0}), (6, {"a": 1.0})], 6)
        merger.receive([{8: means(1.0, 1)}], TimeoutError("late"), is_done=True)
        assert told[3:] == []
        merger.receive([{6: means(9.0, 1), 8: means(1.0, 1)}], None, is_done=True)
        assert told[3:] == [(8, {"a": 1.0})]

    def test_are_those_of_the_other_ranks_where_one_is_lost_before_a_file_is_saved(self) -> None:
        told, failure = list[int](), WorkersLostError("gone")
        merger = StepMetricsMerger(lambda step, metrics: told.append(step))
        merger.receive([{2: means(1.0, 6)}], failure, is_done=False)
        assert told == []  # they are asked again
        merger.receive([{2: means(1.0, 6)}], failure, is_done=True)
        assert told == [2]
        merger.receive([], failure, is_done=True)
        assert told == [2]


class Counts(Callback):
    """Is told of the metrics of steps."""

    def on_step_metrics(self, run: Run, step: int, metrics: dict[str, float]) -> None: ...


class TestStepReports:
    def test_are_asked_for_at_most_once_a_second_while_a_call_runs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ranks, clock = Ranks({}, {}), SimpleNamespace(now=100.0)
        for module in ("raysgd.trainer.driver.fit_epoch", "raysgd.core.engine.transfers"):
            monkeypatch.setattr(f"{module}.time", SimpleNamespace(monotonic=lambda: clock.now))
        reader = reports_of(ranks).reader
        assert reader is not None
        for clock.now, is_done, num_asked in (
            (100.0, False, 1),
            (100.9, False, 1),
            (101.1, False, 2),
            (101.2, True, 3),
            (101.3, False, 3),
        ):
            reader(is_done)
            assert ranks.num_asked == num_asked
        ranks.group = None
        reader(True)
        assert ranks.num_asked == 3, "no workers run"

    def test_of_ranks_that_answer_go_into_a_checkpoint(self) -> None:
        ranks = Ranks((3, means(1.0, 2)), WorkersLostError("gone"))
        reports = reports_of(ranks)
        saved = open_steps_from_data(reports.open_steps())
        assert saved == (3, (means(1.0, 2),))
        ranks.answers = [WorkersLostError("gone")] * 2
        assert reports.open_steps() is None
        assert reports_of(ranks, log_every_n_steps=0).open_steps() is None


def reports_of(ranks: Ranks, log_every_n_steps: int = 1) -> StepReports:
    """Return the reports of a run with a callback that is told of the metrics of steps."""
    life = SimpleNamespace(framework=SimpleNamespace(acts_between_steps=True), controller=ranks)
    run = Run(name="run", callbacks=[Counts()])
    calls = CallbackCalls(run.callbacks, run)
    return StepReports(cast("Any", life), run, calls, (), log_every_n_steps, journal=None, is_taken_over=False)


def means(value: float, num_samples: int) -> MetricSummary:
    total = value * num_samples if num_samples else 0.0
    return MetricSummary({"num_samples": num_samples, "a": value, "last_a": value}, {"a": (total, num_samples)})


class Ranks:
    """A group of ranks with these answers, and the controller that has it."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.num_asked = 0
        self.group: Ranks | None = self

    def ensure_group(self) -> Ranks:
        return self

    def __len__(self) -> int:
        return len(self.answers)

    def fetch(self, rank: int, function: Any, *received: Any) -> Any:
        self.num_asked += rank == 0

        def result(timeout_s: float) -> Any:
            if isinstance(self.answers[rank], Exception):
                raise self.answers[rank]
            return self.answers[rank]

        return SimpleNamespace(result=result)
