"""Training with the real Horovod on several workers: as in one process, as with `DistributedDataParallel`."""

from __future__ import annotations

import itertools
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import raysgd
from raysgd import testing
from raysgd.callbacks import Callback, Checkpointing, Run
from raysgd.core.numbers.results import CallProgress
from raysgd.exceptions import WorkerError
from raysgd.journal.journal import Journal
from raysgd.torch import TorchTrainer
from raysgd.trainer.configuration import Recovery
from tests.torch.gate import WaitsForSignal, mark_when_inside, waiting_for_signal
from tests.torch.lab import Experiment, Findings, run_alone, run_together
from tests.torch.operators_for_tests import (
    NUM_FEATURES,
    BatchNormOperator,
    LinearOperator,
    OwnBatchOperator,
    OwnEpochOperator,
    dataset,
    equal,
)

pytestmark = pytest.mark.integration

# 21 samples by 8: in the last global batch of 5 one rank has 3 samples, the other 2.
CONFIG = {"num_samples": 21, "batch_size": 4, "lr": 0.1}
JOINT = {**CONFIG, "batch_size": 8}
CALLS = (("train", None), ("train", None), ("validate", None))


@pytest.fixture(scope="module")
def two(ray_cluster: None) -> Iterator[TorchTrainer]:
    """Two workers with Horovod."""
    options: dict[str, Any] = {"config": CONFIG, "num_cpus_per_worker": 0.5, "backend": "horovod"}
    with TorchTrainer(training_operator_cls=LinearOperator, num_workers=2, **options) as trainer:
        yield trainer


@pytest.fixture(scope="module")
def gloo(ray_cluster: None) -> Iterator[TorchTrainer]:
    """Two workers with `DistributedDataParallel`."""
    options: dict[str, Any] = {"config": CONFIG, "num_cpus_per_worker": 0.5}
    with TorchTrainer(training_operator_cls=LinearOperator, num_workers=2, **options) as trainer:
        yield trainer


def run_with_horovod(two: TorchTrainer, operator_cls: Any, config: Any = CONFIG, calls: Any = CALLS) -> Findings:
    return run_together(two, Experiment(operator_cls, config, calls, {"use_horovod": True}))


def assert_close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def assert_alike(results: Any, expected: Any) -> None:
    """Whether the same is reported, but for what each rank has of its own, the last batch."""
    for result, other in zip(results, expected, strict=True):
        shared = [name for name in other if not name.startswith("last_") and name != "batch_count"]
        assert result == pytest.approx({**result, **{name: other[name] for name in shared}}, rel=1e-6, nan_ok=True)


# ------------------------------------------------------------------------------------------------ one process


@pytest.mark.parametrize("operator_cls", [LinearOperator, OwnBatchOperator, OwnEpochOperator])
def test_two_ranks_train_as_one_process_on_the_global_batch(
    two: TorchTrainer, operator_cls: type[LinearOperator]
) -> None:
    found = run_with_horovod(two, operator_cls, {**CONFIG, "optimizer": "adam"})
    alone = run_alone(Experiment(operator_cls, {**JOINT, "optimizer": "adam"}, CALLS))
    assert equal(found.model[0], found.model[1])
    assert_close(found.model[0], alone.model[0])
    assert_alike(found.results, alone.results)


class Rival(LinearOperator):
    """Two models against each other: two backward passes before one step, and one that also reaches the other model."""

    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(0)
        models = [torch.nn.Linear(NUM_FEATURES, NUM_FEATURES), torch.nn.Linear(NUM_FEATURES, 1)]
        optimizers = [torch.optim.Adam(model.parameters(), lr=0.05) for model in models]
        schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5) for optimizer in optimizers]
        self.models, self.optimizers, self.criterion, self.schedulers = self.register(
            models=models, optimizers=optimizers, criterion=torch.nn.MSELoss(), schedulers=schedulers
        )
        self.model, self.seen = self.models[0], []
        self.register_data(train_loader=self.make_loader(dataset(config["num_samples"])))

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        features, _, target = batch
        (maker, judge), (maker_optimizer, judge_optimizer) = self.models, self.optimizers
        made = maker(features)
        judge_optimizer.zero_grad(set_to_none=True)
        self.criterion(judge(features), target).backward()
        self.criterion(judge(made.detach()), -target).backward()
        judge_optimizer.step()
        maker_optimizer.zero_grad()
        loss = self.criterion(judge(made), target)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(maker.parameters(), 0.5)
        maker_optimizer.step()
        for scheduler in self.schedulers:
            scheduler.step()
        return {"train_loss": loss.detach(), "num_samples": len(target)}


def test_several_models_with_several_backward_passes_train_as_in_one_process(two: TorchTrainer) -> None:
    calls, options = (("train", None),) * 2, {"scheduler_step_freq": "manual"}
    found = run_together(two, Experiment(Rival, CONFIG, calls, {**options, "use_horovod": True}))
    alone = run_alone(Experiment(Rival, JOINT, calls, options))
    assert equal(found.model[0], found.model[1])
    assert_close(found.model[0], alone.model[0])
    assert found.results[1]["train_loss"] == pytest.approx(alone.results[1]["train_loss"], rel=1e-5)


def test_gradients_are_those_of_all_ranks_when_the_backward_pass_is_over(two: TorchTrainer) -> None:
    class Looks(LinearOperator):
        def optimizer_step(self) -> None:
            self.seen.append(self.model.weight.grad.tolist())
            super().optimizer_step()

        def prepare_batch(self, batch: Any) -> Any:
            features, _, target = batch
            return (features,), target

    first, second = run_with_horovod(two, Looks, calls=[("train", None)]).seen
    [alone] = run_alone(Experiment(Looks, JOINT)).seen
    assert first == second
    assert_close(torch.tensor(first), torch.tensor(alone))


def test_replicas_begin_as_rank_0_whatever_they_were_made_as(two: TorchTrainer) -> None:
    class Differs(LinearOperator):
        def make_model(self) -> torch.nn.Module:
            torch.manual_seed(self.world_rank)
            return super().make_model().to(torch.float64)

        def register(self, **parts: Any) -> Any:
            parts["optimizers"] = torch.optim.SGD(parts["models"].parameters(), lr=0.1 + self.world_rank)
            found = super().register(**parts)
            assert found[1].param_groups[0]["lr"] == 0.1
            return found

    first, second = run_with_horovod(two, Differs, calls=[]).model
    torch.manual_seed(0)
    assert equal(first, second)
    assert equal(first, torch.nn.Linear(NUM_FEATURES, 1).to(torch.float64).state_dict())


@pytest.mark.parametrize("parallel", ["ddp", "none"])
def test_numbers_can_be_added_up_over_the_ranks(two: TorchTrainer, parallel: str) -> None:
    class Adds(LinearOperator):
        def setup(self, config: dict[str, Any]) -> None:
            super().setup(config)
            numbers = torch.tensor([self.world_rank + 1, 10], dtype=torch.float64)
            self._raysgd.parallel.all_sum(numbers)
            self.seen = [numbers.tolist()]

    found = run_together(two, Experiment(Adds, calls=[], options={"use_horovod": True, "strategy": parallel}))
    assert found.seen == [[[3, 20]]] * 2


# ------------------------------------------------------------------------------------------------ data


class Uneven(LinearOperator):
    """A loader that is not divided, with a batch more on rank 0; a single process has the global batches."""

    def make_loader(self, data: Any, shuffle: bool = False) -> Any:
        batches = list(DataLoader(data, batch_size=4))
        if len(batches) < 5:
            return None  # of the validation
        if not self._is_distributed:
            own = [batches[:2], batches[2:4], batches[4:5]]
            return [[torch.cat(parts) for parts in zip(*pair, strict=True)] for pair in own]
        return [batches[0], batches[2], batches[4]] if self.world_rank == 0 else [batches[1], batches[3]]


@pytest.mark.parametrize("operator_cls", [Uneven, type("UnevenOwn", (Uneven, OwnBatchOperator), {})])
def test_loaders_of_unequal_length_end_together(two: TorchTrainer, operator_cls: Any) -> None:
    calls = (("train", 2), ("train", None), ("train", None))
    found = run_with_horovod(two, operator_cls, calls=calls)
    alone = run_alone(Experiment(operator_cls, CONFIG, calls))
    assert equal(found.model[0], found.model[1])
    assert_close(found.model[0], alone.model[0])


def test_a_stream_may_be_left_in_the_middle_and_begun_again(two: TorchTrainer) -> None:
    """Where ranks agree step by step there is then a vote that nobody waits for."""

    def restart(operator: Any) -> Any:
        from raysgd.core.engine.shared.types import World
        from raysgd.torch.operator.settings import TorchSettings
        from raysgd.torch.torch_runner import TorchRunner
        from raysgd.trainer.messages.epochs import EpochRequest

        world = World(operator.world_rank, operator.world_size)
        runner = TorchRunner(TorchSettings(Uneven, CONFIG, use_horovod=True), world)
        runner.setup()
        for _ in range(12):
            runner.train_epoch(EpochRequest(1, {}, False, 0))
            runner.restore(runner.state(), None)
        return runner.train_epoch(EpochRequest(None, {}, False, 0)).num_steps

    assert two.apply_all_operators(restart) == [3, 3]


def test_evaluation_has_no_collectives_and_uses_the_buffers_of_rank_0(two: TorchTrainer, gloo: TorchTrainer) -> None:
    config = {**CONFIG, "num_samples": 16, "num_validation_samples": 9}  # three batches on one rank, two on the other
    experiment = Experiment(BatchNormOperator, {**config, "batch_size": 2}, CALLS)
    found, expected = run_with_horovod(two, BatchNormOperator, experiment.config), run_together(gloo, experiment)
    assert_close(found.model, expected.model)
    assert found.results[2]["val_loss"] == pytest.approx(expected.results[2]["val_loss"], rel=1e-6)
    assert found.results[2]["num_samples"] == 9


# ------------------------------------------------------------------------------------------------ the trainer


def test_checkpoints_travel(
    two: TorchTrainer, gloo: TorchTrainer, make_local: Callable[..., TorchTrainer], tmp_path: Path
) -> None:
    """From Horovod to `DistributedDataParallel` to a single process, and back, in the middle of a pass."""
    alone = make_local(config=JOINT)
    two.load_state_dict(alone.state_dict())
    for trainer in (two, alone):
        trainer.train(num_steps=2)
    route = [two, gloo, make_local(config=JOINT), two]
    for number, (trainer, following) in enumerate(itertools.pairwise(route)):
        following.load(trainer.save(tmp_path / f"{number}.pt"))
        results = following.train(num_steps=2), alone.train(num_steps=2)
        assert results[0]["epoch"] == results[1]["epoch"]
        state, expected = following.state_dict(), alone.state_dict()
        assert_close([state["models"], state["optimizers"]], [expected["models"], expected["optimizers"]])
        assert_close(following.get_model(to_cpu=True).state_dict(), expected["models"][0])


class Mortal(LinearOperator):
    """Is killed in its third batch where `info` says so, once, as soon as there is the file named beside."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        victim, once, awaited = batch_info.get("kill", (None, "", ""))
        if victim == self.world_rank and batch_info["batch_idx"] == 2 and not Path(once).exists():
            while not Path(awaited).exists():
                time.sleep(0.01)
            Path(once).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if batch_info.get("raise") == self.world_rank:
            raise ZeroDivisionError("on purpose")
        return super().train_batch(batch, batch_info)


@pytest.mark.parametrize("use_local", [pytest.param(False, marks=pytest.mark.soak), True])
def test_a_killed_worker_costs_a_call_or_less_and_no_result(
    make_local: Callable[..., TorchTrainer], ray_cluster: None, tmp_path: Path, use_local: bool
) -> None:
    """Also where the driver is a rank, whose process has to form the next group as well."""
    config = {**CONFIG, "optimizer": "adam"}
    alone = make_local(config={**JOINT, "optimizer": "adam"})
    options: dict[str, Any] = {} if use_local else {"recovery": Recovery(snapshot_every_n_steps=1)}
    kill = (1, str(tmp_path / "once"), str(tmp_path if use_local else tmp_path / "landed"))
    with TorchTrainer(
        training_operator_cls=Mortal, config=config, num_workers=2, backend="horovod", use_local=use_local, **options
    ) as trainer:
        found = [trainer.train()]
        if not use_local:
            threading.Thread(target=mark_when_inside, args=(trainer, tmp_path / "landed")).start()
        found += [trainer.train(info={"kill": kill}), trainer.validate()]
        expected = [alone.train(), alone.train(), alone.validate()]
        assert trainer._num_failures == 1
        assert trainer.num_workers == 2
        [rebuilt] = [event for event in trainer.status().events if event.kind == "restored"]
        assert ("inside the call" in rebuilt.detail) == (not use_local)
        state, wanted = trainer.state_dict(), alone.state_dict()
        with pytest.raises(WorkerError, match="ZeroDivisionError: on purpose") as caught:
            trainer.train(info={"raise": 1})
        assert trainer._num_failures == 1, "it was not tried again"
    assert caught.value.faults[0].rank == 1
    assert_alike(found, expected)
    assert_close([state["models"], state["optimizers"]], [wanted["models"], wanted["optimizers"]])


class Draws(WaitsForSignal, LinearOperator):
    """Draws random numbers in training and in validation."""

    def make_model(self) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(NUM_FEATURES, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> Any:
        torch.rand(7)
        return super().validate_batch(batch, batch_info)


class Told(Callback):
    """Gets a signal for the program once an epoch is so far, and keeps the steps of validations inside epochs."""

    def __init__(self, at: float = math.inf) -> None:
        self.at, self.steps = at, list[int]()

    def on_progress(self, run: Run, progress: CallProgress) -> None:
        if progress.kind == "train" and progress.num_steps >= self.at:
            self.at = math.inf
            signal.raise_signal(signal.SIGTERM)

    def on_validation(self, run: Run, step: int, metrics: dict[str, Any]) -> None:
        self.steps.append(step)


def test_an_epoch_is_validated_saved_and_left_at_a_step(ray_cluster: None, tmp_path: Path) -> None:
    config = {"num_samples": 96, "shuffle": True, "gate": str(tmp_path / "gate")}  # 12 batches an epoch

    def made() -> TorchTrainer:
        options: dict[str, Any] = {"config": config, "num_cpus_per_worker": 0.5, "backend": "horovod", "seed": 3}
        return TorchTrainer(training_operator_cls=Draws, num_workers=2, **options)

    with made() as trainer:
        wanted = trainer.fit(2)
        state = trainer.state_dict()
    more: dict[str, Any] = {"validate_every_n_steps": 5, "resume_from": "auto"}
    with made() as trainer, waiting_for_signal(trainer, 3), pytest.raises(raysgd.Preempted):
        trainer.fit(2, callbacks=[Told(3), Checkpointing(tmp_path, every_n_steps=4)], **more)
    with made() as trainer:
        told = Told()
        testing.kill_worker(trainer, 1, at="validate")
        history = trainer.fit(2, callbacks=[told, Checkpointing(tmp_path, every_n_steps=4, blocking=False)], **more)
        assert any(event.is_failure for event in trainer.history.events)
        assert equal(trainer.state_dict(), state)
    assert told.steps[-3:] == [10, 15, 20]
    assert history["train_loss"] == wanted["train_loss"]
    assert history["num_samples"] == wanted["num_samples"] == [96, 96]


def test_a_guard_leaves_a_bad_step_out_on_all_workers(ray_cluster: None, tmp_path: Path) -> None:
    from raysgd.callbacks import Guard
    from tests import bad_batches

    case = bad_batches.Case(bad_batches.Stock, 2, 1, 8, {4 * bad_batches.SIZE - 1: bad_batches.NAN})
    config = {"num_steps": case.num_steps, "faults": case.faults, "batch_size": bad_batches.SIZE // 2}
    options: dict[str, Any] = {"config": config, "scheduler_step_freq": "batch"}
    with TorchTrainer(
        training_operator_cls=case.operator, backend="horovod", num_workers=2, num_cpus_per_worker=0.5, **options
    ) as trainer:
        trainer.fit(1, callbacks=[Guard()], folder=tmp_path)
        weights = trainer.get_model().parameters()
    assert [(each.step, each.ranks) for each in Journal(tmp_path).left_out] == [(4, (1,))]
    for weight, expected in zip(weights, bad_batches.expected(case, [])[0], strict=True):
        torch.testing.assert_close(weight.detach(), expected, rtol=0, atol=1e-9)
