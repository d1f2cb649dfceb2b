"""The replica that hosts one operator, alone and without workers.

Covers `raysgd.trainer.worker.runner` with what is behind it (`raysgd.trainer.worker.hosted`,
`raysgd.trainer.worker.runner`, `raysgd.trainer.worker.training_call`, `raysgd.trainer.worker.replica_state`,
`raysgd.torch.hosting.torch_hosted`), and `raysgd.torch.hosting.torch_state`: a runner is one object for those that
call it.
"""

from __future__ import annotations

import copy
import itertools
import sys
import uuid
from collections.abc import Iterable
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, MeanSquaredError

from raysgd.core.arrays.user_data import CallData
from raysgd.core.engine.shared.types import HeldAtStep, SamplesUsed, StateHandover, World
from raysgd.core.state.state_codec import decode
from raysgd.torch import TrainingOperator
from raysgd.torch.data.feed import DividedLoaderSource, PlainSource
from raysgd.torch.objects.metric_objects import capture
from raysgd.torch.operator.settings import TorchSettings
from raysgd.torch.parallel.options import StepOptions
from raysgd.torch.torch_runner import TorchRunner
from raysgd.trainer.configuration import BatchOptions, Recovery
from raysgd.trainer.messages.epochs import EpochAnswer, EpochRequest
from raysgd.trainer.worker import replica_state
from raysgd.trainer.worker.replica_state import RESUME
from raysgd.utils import IS_PADDING, AverageMeterCollection
from tests.torch.apex_double import StrictAmp
from tests.torch.lab import validate_on_spare
from tests.torch.operators_for_tests import LinearOperator, OwnEpochOperator, equal

ALONE = World(rank=0, size=1)


def make_runner(operator_cls: type[TrainingOperator] = LinearOperator, **config: Any) -> TorchRunner:
    runner = TorchRunner(TorchSettings(operator_cls, config), ALONE)
    runner.setup()
    return runner


def train(runner: TorchRunner, num_steps: int | None = None, shard: Any = None, **options: Any) -> EpochAnswer:
    key = None if shard is None else uuid.uuid4().hex
    request = EpochRequest(
        num_steps, options.pop("info", {}), options.pop("profile", False), seed=0, shard_key=key, **options
    )
    return runner.train_epoch(request, None if shard is None else CallData("shards", shard))


def values(answer: EpochAnswer) -> dict[str, Any]:
    assert answer.metrics is not None
    return dict(answer.metrics)


# ------------------------------------------------------------------------------------------------ facts


def test_the_facts_tell_what_is_registered() -> None:
    facts = make_runner(shuffle=True, seed=3).setup()
    assert (facts.num_models, facts.num_optimizers, facts.num_schedulers) == (1, 1, 0)
    assert facts.train_data == "20 samples, shuffled, batch_size=4, drop_last=False"
    assert facts.validation_data == "13 samples, sequential, batch_size=4, drop_last=False"
    assert facts.seed == 3
    assert not facts.keeps_own_state
    assert not facts.is_synchronous


# ------------------------------------------------------------------------------------------------ epochs


class WithoutData(LinearOperator):
    def register_data(self, **loaders: Any) -> None:
        """Leaves the data to each call."""


class InfoOperator(LinearOperator):
    """Keeps what it is told."""

    def train_epoch(self, iterator: Iterable[Any], info: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        self.told = info
        return {"num_batches": len(list(iterator))}

    def validate(self, val_iterator: Iterable[Any], info: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        self.told = info
        return {"num_batches": len(list(val_iterator))}


def test_the_epoch_index_is_that_of_the_pass_being_trained() -> None:
    runner = make_runner(InfoOperator)  # five batches a pass
    found = []
    for num_steps in (None, 2, 2, 3, 8, None):
        answer = train(runner, num_steps)
        found.append((runner.operator.told["epoch_idx"], values(answer)["epoch"]))  # type: ignore[attr-defined]
    assert found == [(0, 1), (1, 2), (1, 2), (1, 3), (2, 4), (4, 5)]


def test_a_profile_is_added_only_when_asked_for() -> None:
    runner = make_runner()
    assert "profile" not in values(train(runner))
    profile = values(train(runner, profile=True))["profile"]
    assert {*profile} == {"mean_train_epoch_s", "mean_fwd_s", "mean_grad_s", "mean_apply_s"}
    assert all(seconds > 0 for seconds in profile.values())
    answer = runner.validate(EpochRequest(None, {}, True, seed=0))
    assert {*values(answer)["profile"]} == {"mean_validation_s", "mean_eval_fwd_s"}


def test_timers_of_the_user_are_in_the_profile() -> None:
    class Timed(LinearOperator):
        def train_epoch(self, iterator: Any, info: Any) -> Any:  # type: ignore[override]
            with self.timers.record("mine"):
                return {"done": 1}

    assert "mean_mine_s" in values(train(make_runner(Timed), profile=True))["profile"]


def test_an_epoch_that_never_draws_counts_as_one() -> None:
    class Idle(WithoutData):
        def train_epoch(self, iterator: Any, info: Any) -> Any:  # type: ignore[override]
            return {"done": 1}

    runner = make_runner(Idle)
    assert [values(train(runner)) for _ in range(2)] == [{"epoch": 1, "done": 1}, {"epoch": 2, "done": 1}]


@pytest.mark.parametrize("kind", [int, float])
def test_an_epoch_of_the_users_own_says_how_many_samples_it_had(kind: Any) -> None:
    class Own(LinearOperator):
        def train_epoch(self, iterator: Any, info: Any) -> Any:  # type: ignore[override]
            return {"num_samples": kind(sum(len(batch[0]) for batch in iterator))}

    heartbeat = train(make_runner(Own)).heartbeat
    assert heartbeat is not None
    assert heartbeat.num_samples == 20, "for the throughput"


def test_tensors_leave_as_numbers_or_on_the_cpu() -> None:
    class Tensors(LinearOperator):
        def train_epoch(self, iterator: Any, info: Any) -> Any:  # type: ignore[override]
            return {"scalar": torch.tensor(2.5), "vector": torch.ones(2, requires_grad=True)}

    found = values(train(make_runner(Tensors)))
    assert found["scalar"] == 2.5
    assert isinstance(found["scalar"], float)
    assert not found["vector"].requires_grad


@pytest.mark.parametrize(("call", "named"), [("train", "train_loader"), ("validate", "validation_loader")])
def test_a_missing_loader_is_an_error_when_it_is_drawn_from(call: str, named: str) -> None:
    runner = make_runner(WithoutData)
    method = {"train": runner.train_epoch, "validate": runner.validate}[call]
    for kind in (RuntimeError, ValueError):
        with pytest.raises(kind, match=f"`{named}` was not registered"):
            method(EpochRequest(None, {}, False, seed=0))


def test_a_shard_that_is_known_already_goes_on_until_the_state_is_another_one() -> None:
    runner = make_runner()
    data = [(torch.zeros(1, 3), torch.tensor([number]), torch.zeros(1, 1)) for number in range(3)]
    request = EpochRequest(1, {}, False, 0, shard_key="mine")
    runner.train_epoch(request, CallData("shards", data))
    state = runner.state()
    for _ in range(3):
        runner.train_epoch(request)
    assert runner.operator.seen == [[0], [1], [2], [0]]  # type: ignore[attr-defined]
    runner.restore(state, None)
    runner.train_epoch(request)
    assert runner.operator.seen[-1] == [0]  # type: ignore[attr-defined]


def test_shards_of_pairs_are_joined_to_tensors() -> None:
    class Pairs(LinearOperator):
        def train_epoch(self, iterator: Any, info: Any) -> Any:  # type: ignore[override]
            [(features, target)] = list(iterator)
            return {"features": features, "target": target}

    scalars = [(torch.tensor(1.0), torch.tensor(2.0)), (torch.tensor(3.0), torch.tensor(4.0))]
    found = values(train(make_runner(Pairs), shard=[scalars]))
    assert (found["features"].tolist(), found["target"].tolist()) == ([1.0, 3.0], [2.0, 4.0])
    rows = [(torch.ones(1, 2), torch.zeros(1, 1)), (torch.ones(1, 2), torch.zeros(1, 1))]
    found = values(train(make_runner(Pairs), shard=[rows]))
    assert (found["features"].shape, found["target"].shape) == ((2, 2), (2, 1))


def test_progress_is_read_beside_a_running_epoch() -> None:
    class Watched(LinearOperator):
        def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
            self.progress.append(runner.progress())
            return super().train_batch(batch, batch_info)

    runner = make_runner(Watched)
    runner.operator.progress = []  # type: ignore[attr-defined]
    assert runner.progress() is None
    train(runner, info={"num_epochs": 4})
    assert runner.progress() is None
    found = runner.operator.progress  # type: ignore[attr-defined]
    assert [(p.num_steps, p.total, p.epoch_idx, p.num_epochs) for p in found] == [(i, 5, 0, 4) for i in range(1, 6)]
    assert found[0].loss is None
    assert all(isinstance(p.loss, float) for p in found[1:])


def test_progress_of_an_evaluation_shows_its_own_metrics() -> None:
    class Watched(LinearOperator):
        def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
            self.progress.append(runner.progress())
            return super().validate_batch(batch, batch_info)

    runner = make_runner(Watched)
    runner.operator.progress = []  # type: ignore[attr-defined]
    train(runner)
    validate(runner)
    found = runner.operator.progress  # type: ignore[attr-defined]
    assert [(p.kind, p.num_steps, p.epoch_idx) for p in found[:2]] == [("validation", 1, 0), ("validation", 2, 0)]
    assert not found[0].metrics
    assert found[1].metrics["val_loss"] == found[1].loss
    assert runner.progress() is None


@pytest.mark.parametrize("call", [TorchRunner.train_epoch, TorchRunner.validate])
def test_a_replica_in_the_driver_redraws_between_steps(call: Any) -> None:
    runner = make_runner()
    found: list[Any] = []
    call(runner, EpochRequest(None, {}, False, seed=0, redraw=lambda: found.append(runner.progress())))
    assert found
    assert found[0].num_steps == 1


# ------------------------------------------------------------------------------------------------ state


def snapshot(runner: TorchRunner) -> tuple[Any, Any]:
    capture = runner.capture(None)
    state = capture.shared_state if capture.token is None else runner.fetch(capture.token)
    return state, capture.rank_state


def test_a_restored_replica_does_not_share_memory_with_the_snapshot() -> None:
    runner = make_runner(optimizer="adam")
    train(runner)
    state, own_state = snapshot(runner)
    before = decode(state, copy=True)
    runner.restore(state, own_state)
    train(runner)
    assert equal(decode(state, copy=True), before)


def test_a_small_state_travels_with_the_answer_and_a_large_one_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner()
    assert runner.capture(None).token is None
    monkeypatch.setattr(replica_state, "_INLINE_BYTES", 8)
    capture = runner.capture(None)
    assert capture.shared_state is None
    assert capture.token is not None
    assert equal(decode(runner.fetch(capture.token), copy=True), runner.state())


def test_memory_of_a_snapshot_that_has_landed_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_state, "_INLINE_BYTES", 8)
    runner = make_runner()
    tokens = [runner.capture(None).token, runner.capture(None).token]
    assert tokens[0] is not None
    assert runner.fetch(tokens[0]).num_bytes > 0
    third = runner.capture(tokens[1])
    for token in tokens:
        with pytest.raises(KeyError):
            runner.fetch(token)  # type: ignore[arg-type]
    assert equal(decode(runner.fetch(third.token), copy=True), runner.state())  # type: ignore[arg-type]


def test_a_snapshot_that_the_driver_shares_is_never_written_to_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_state, "_INLINE_BYTES", 8)
    runner = TorchRunner(TorchSettings(LinearOperator, {}), ALONE)
    runner.setup()
    token = runner.capture(None).token
    assert token is not None
    snapshot = runner.fetch(token)
    before = decode(snapshot, copy=True)
    train(runner)
    runner.capture(token)
    assert equal(decode(snapshot, copy=True), before)


def test_ranks_beyond_the_first_capture_their_random_state_only() -> None:
    runner = TorchRunner(TorchSettings(LinearOperator, {}, strategy="none"), World(rank=1, size=2))
    runner.setup()
    capture = runner.capture(None)
    assert (capture.shared_state, capture.token) == (None, None)
    assert capture.rank_state["torch"]


def test_a_snapshot_of_fewer_ranks_restores_random_state_where_it_has_one() -> None:
    runner = make_runner()
    state, _ = snapshot(runner)
    other = TorchRunner(TorchSettings(LinearOperator, {}, strategy="none"), World(rank=1, size=2))
    other.setup()
    torch.manual_seed(123)
    before = torch.get_rng_state()
    other.restore(state, None)
    assert torch.equal(torch.get_rng_state(), before)


def drawn_at(*places: World, **options: Any) -> list[float]:
    """What a replica draws that was built at the first of some places, and took the others before its training."""
    runner = TorchRunner(TorchSettings(LinearOperator, {}, strategy="none", **options), places[0])
    runner.setup()
    for place in places[1:]:
        torch.rand(3)  # the step ahead of time of a standby worker, for example
        runner.regroup(place, StateHandover())
    drawn: list[float] = torch.rand(3).tolist()
    return drawn


def test_ranks_that_setup_seeds_alike_have_their_own_random_numbers_afterwards() -> None:
    alone, first, second, third = (drawn_at(World(*place)) for place in ((0, 1), (0, 3), (1, 3), (2, 3)))
    assert first == alone, "that of the seed"
    assert len({*map(tuple, (first, second, third))}) == 3
    assert drawn_at(World(1, 3)) == second, "a second run has the same"


def test_the_place_in_the_group_decides_on_random_numbers_before_a_training() -> None:
    first, second = drawn_at(World(0, 2)), drawn_at(World(1, 2))
    assert drawn_at(World(1, 2), World(0, 2)) == first
    assert drawn_at(World(0, 2), World(1, 2)) == drawn_at(World(2, 3), World(0, 1), World(1, 2)) == second


@pytest.mark.parametrize("seed", [None, 4])
def test_the_order_of_data_of_a_call_does_not_change_with_who_is_the_first_rank(seed: int | None) -> None:
    runner = TorchRunner(TorchSettings(WithoutData, {}, strategy="none", seed=seed), World(1, 2))
    facts = runner.setup()
    assert runner.regroup(World(0, 2), StateHandover()).seed == facts.seed


class SeedsNumPy(LinearOperator):
    def setup(self, config: dict[str, Any]) -> None:
        numpy.random.seed(0)
        super().setup(config)


@pytest.mark.parametrize("seed", [None, 4])
def test_a_new_worker_has_other_random_numbers_than_who_had_its_place_before(seed: int | None) -> None:
    def drawn_after(*places: World) -> tuple[float, float]:
        runner = TorchRunner(TorchSettings(SeedsNumPy, {}, strategy="none", seed=seed), places[0])
        runner.setup()
        for place in places[1:]:
            train(runner, num_steps=1)  # without a random number
            runner.regroup(place, StateHandover())
        return float(torch.rand(())), float(numpy.random.rand())

    kept, moved = drawn_after(World(1, 2), World(1, 2)), drawn_after(World(1, 2), World(0, 2))
    new = drawn_after(World(1, 2))
    assert kept == new, "it keeps what it has where it stays"
    assert not {*moved} & {*new}


@pytest.mark.parametrize("seed", [None, 4])
def test_a_worker_that_joins_draws_no_number_that_was_drawn_in_its_place(
    seed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drawn_after_joining(num_steps: int) -> float:
        first = TorchRunner(TorchSettings(LinearOperator, {}, seed=seed), ALONE)
        first.setup()
        if num_steps:
            train(first, num_steps=num_steps)
        joining = TorchRunner(TorchSettings(LinearOperator, {}, strategy="none", seed=seed), World(1, 2))
        joining.setup()
        monkeypatch.setattr(joining._hosted, "receive", lambda source, takers: (first._hosted.state.read(), None))
        joining.regroup(World(1, 2), StateHandover(source=0, takers=(1,)))
        return float(torch.rand(()))

    drawn = [drawn_after_joining(num_steps) for num_steps in (0, 1, 2, 2)]
    assert len({*drawn[:3]}) == 3
    assert drawn[2] == drawn[3], "a second run has the same"


def test_where_nothing_random_belongs_to_a_rank_it_goes_on_as_setup_left_it() -> None:
    options = {"batch_options": BatchOptions(deterministic=True)}
    assert drawn_at(World(1, 2), **options) == drawn_at(World(0, 2))


def test_a_loader_that_is_not_divided_starts_over() -> None:
    class Plain(LinearOperator):
        def make_loader(self, data: Any, shuffle: bool = False) -> Any:
            return list(DataLoader(data, batch_size=4))

    first = make_runner(Plain)
    train(first, num_steps=2)
    second = make_runner(Plain)
    second.restore(*snapshot(first))
    train(second, num_steps=1)
    assert second.operator.seen == [[0, 1, 2, 3]]  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------------ apex


@pytest.fixture
def apex(monkeypatch: pytest.MonkeyPatch) -> StrictAmp:
    module = ModuleType("apex")
    module.amp = StrictAmp()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "apex", module)
    return module.amp  # type: ignore[attr-defined, no-any-return]


class OldApexOperator(LinearOperator):
    """A `train_batch` written for Apex."""

    def register(self, **parts: Any) -> Any:
        return super().register(**parts, apex_args={"opt_level": "O2", "verbosity": 0})

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        features, _, target = batch
        loss = self.criterion(self.model(features), target)
        self.optimizer.zero_grad()
        with self._amp.scale_loss(loss, self.optimizer) as scaled:
            scaled.backward()
        self.optimizer.step()
        return {"train_loss": loss.item(), "num_samples": len(target)}


def trained_model(operator_cls: type[TrainingOperator], **options: Any) -> tuple[TorchRunner, dict[str, Any]]:
    runner = TorchRunner(TorchSettings(operator_cls, options.pop("config", {}), **options), ALONE)
    runner.setup()
    train(runner)
    return runner, runner.state()


@pytest.mark.parametrize("operator_cls", [LinearOperator, OldApexOperator])
def test_apex_trains_as_without_it(operator_cls: type[TrainingOperator], apex: StrictAmp) -> None:
    runner, state = trained_model(operator_cls, use_fp16="apex")
    _, expected = trained_model(LinearOperator)
    for name, tensor in expected["models"][0].items():
        torch.testing.assert_close(state["models"][0][name], tensor)
    assert state["amp_apex"] == {"loss_scaler0": {"loss_scale": 8.0, "unskipped": 5}}
    assert (runner.operator.use_fp16_apex, runner.operator._amp) == (True, apex)
    if operator_cls is OldApexOperator:
        assert apex.options["opt_level"] == "O2"


class BadOnceOperator(LinearOperator):
    """Has a loss of NaN in its second step."""

    def forward(self, features: Any, target: Any) -> Any:
        output, loss = super().forward(features, target)
        return output, loss * (torch.nan if self.global_step == 1 else 1.0)


def test_a_guard_leaves_a_bad_step_out_under_apex(apex: StrictAmp) -> None:
    from raysgd.callbacks import Guard

    _, state = trained_model(BadOnceOperator, precision="apex", worker_callbacks=(Guard(),))
    _, expected = trained_model(BadOnceOperator, worker_callbacks=(Guard(),))
    for name, tensor in expected["models"][0].items():
        torch.testing.assert_close(state["models"][0][name], tensor)
    assert state["callbacks"]["Guard"]["skipped"] == expected["callbacks"]["Guard"]["skipped"] == [2]
    with pytest.raises(ValueError, match="so `Guard` cannot see them"):
        trained_model(OldApexOperator, precision="apex", worker_callbacks=(Guard(),))


def test_several_batches_make_a_step_under_apex(apex: StrictAmp) -> None:
    steps = StepOptions(accumulate_grad_batches=2, clip_grad_norm=0.5)
    _, state = trained_model(LinearOperator, precision="apex", step_options=steps)
    clipped = StepOptions(clip_grad_norm=0.5)
    _, expected = trained_model(LinearOperator, config={"batch_size": 8}, step_options=clipped)
    for name, tensor in expected["models"][0].items():
        torch.testing.assert_close(state["models"][0][name], tensor)


def test_a_state_of_apex_travels_also_under_its_old_name(apex: StrictAmp) -> None:
    _, state = trained_model(LinearOperator, precision="apex")
    old = {
        **{key: value for key, value in state.items() if key != "amp_apex"},
        "amp": {"loss_scaler0": {"loss_scale": 2.0, "unskipped": 7}},
    }
    other = TorchRunner(TorchSettings(LinearOperator, {}, precision="apex"), ALONE)
    other.setup()
    other.restore(old, None)
    assert other.state()["amp_apex"] == old["amp"]
    plain = make_runner()
    plain.restore(state, None)
    assert "amp_apex" not in plain.state()


# ------------------------------------------------------------------------------------------------ going on


class BreaksOff(LinearOperator):
    """Loses its group in the step that `breaks_in` names, counted from the first one of this process."""

    breaks_in: int | None = None
    worlds_seen = 0

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        if self.breaks_in is not None:
            self.breaks_in -= 1
            if self.breaks_in < 0:
                self.breaks_in = None
                raise torch.distributed.DistNetworkError("the group is gone")
        return super().train_batch(batch, batch_info)

    def world_changed(self) -> None:
        self.worlds_seen += 1


def survivor(
    operator_cls: type[TrainingOperator] = BreaksOff, every: int | None = None, undo: bool | None = None, **config: Any
) -> TorchRunner:
    """The replica of rank 0 of two, as far as one process can be that; it has the first half of each step."""
    recovery = Recovery(snapshot_every_n_steps=every, undo=undo)
    spec = TorchSettings(operator_cls, {"batch_size": 2, **config}, recovery=recovery)
    runner = TorchRunner(spec, World(rank=0, size=2, local_size=2))
    runner.setup()
    return runner


@pytest.mark.parametrize("may_grow", [False, True])
def test_a_worker_that_starts_alone_can_be_joined_if_others_may_come(process_group: None, may_grow: bool) -> None:
    runner = TorchRunner(TorchSettings(LinearOperator, {}, may_grow=may_grow), ALONE)
    runner.setup()
    assert (runner.replica_progress().obstacle is None) == may_grow


class LearnsItsLoss(LinearOperator):
    """Has a criterion with a parameter, and one more that belongs to nothing."""

    def register(self, **parts: Any) -> Any:
        self.loss = torch.nn.Sequential(torch.nn.Linear(1, 1))
        self.loss.forward = lambda output, target: self.loss[0](output - target).square().mean()  # type: ignore[assignment]
        parts["optimizers"].add_param_group({"params": self.loss.parameters()})
        if self.config.get("has_more"):
            parts["optimizers"].add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
        return super().register(**{**parts, "criterion": self.loss})


def test_a_criterion_with_parameters_is_saved_and_restored(caplog: pytest.LogCaptureFixture) -> None:
    runner, other = make_runner(LearnsItsLoss), make_runner(LearnsItsLoss)
    train(runner)
    state = copy.deepcopy(runner.state())
    assert list(state) == ["epoch", "operator", "models", "optimizers", "criterion", RESUME]
    assert len(runner.models(copied=True)) == 1, "it is no model"
    other.restore(state, None)
    assert equal(other.state()["criterion"], state["criterion"])
    train(other)
    trained = other.state()["criterion"]["0.weight"].clone()
    assert not equal(trained, state["criterion"]["0.weight"])
    with pytest.raises(ValueError, match="does not match"):
        other.restore({**state, "criterion": {}}, None)
    assert not caplog.records
    del state["criterion"]  # a file of before
    other.restore(state, None)
    assert equal(other.state()["criterion"]["0.weight"], trained)
    assert equal(other.state()["models"], state["models"])
    assert "the state has no parameters of the criterion" in caplog.text


def test_a_criterion_that_looks_at_the_model_has_nothing_of_its_own() -> None:
    class Regularizes(LinearOperator):
        def register(self, **parts: Any) -> Any:
            loss = torch.nn.MSELoss()
            loss.model = parts["models"]
            return super().register(**{**parts, "criterion": loss})

    runner = make_runner(Regularizes)
    train(runner)
    assert "criterion" not in runner.state()


def test_an_optimizer_of_what_nobody_saves_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    make_runner(LearnsItsLoss)
    assert not caplog.records
    make_runner(LearnsItsLoss, has_more=True)
    [record] = caplog.records
    assert (
        "belong neither to a registered model nor to the criterion: parameter 0 in group 2 of `SGD`" in record.message
    )


class FailsAt(LinearOperator):
    """Raises at a place of its second step; overrides nothing that would have it watched more closely."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.num_begun = 0
        self.optimizer.register_step_pre_hook(lambda *_: self.meet("before the step"))
        self.optimizer.register_step_post_hook(lambda *_: self.meet("after the step"))
        self.model.register_forward_pre_hook(lambda *_: self.meet("forward"))

    def meet(self, place: str) -> None:
        self.num_begun += place == "forward"
        if self.num_begun == 2 and place == self.config["place"]:
            raise ZeroDivisionError(place)


class FailsAtInOwnLoop(FailsAt, OwnEpochOperator):
    """The same where the epoch could not be gone on with."""


@pytest.mark.parametrize("operator_cls", [FailsAt, FailsAtInOwnLoop])
@pytest.mark.parametrize(
    ("place", "is_whole"), [("forward", True), ("before the step", True), ("after the step", False)]
)
def test_a_replica_is_whole_until_an_optimizer_has_begun(
    operator_cls: type[LinearOperator], place: str, is_whole: bool
) -> None:
    runner = make_runner(operator_cls, place=place)
    with pytest.raises(ZeroDivisionError):
        train(runner)
    replica_progress = runner.replica_progress()
    assert (replica_progress.position, replica_progress.can_be_source) == (1 if is_whole else 2, is_whole)


def broken_off(runner: TorchRunner, in_step: int, num_steps: int | None = None) -> TorchRunner:
    """Lets a call break off in that step, counted from 0."""
    runner.operator.breaks_in = in_step  # type: ignore[attr-defined]
    with pytest.raises(torch.distributed.DistNetworkError):
        train(runner, num_steps)
    return runner


def resume(runner: TorchRunner, num_steps: int | None = None, call: int = 0) -> EpochAnswer:
    answer = runner.resume_epoch(EpochRequest(num_steps, {}, False, seed=0, call_number=call))
    assert isinstance(answer, EpochAnswer)
    return answer


def samples(runner: TorchRunner) -> list[int]:
    return [number for batch in runner.operator.seen for number in batch]  # type: ignore[attr-defined]


def test_a_survivor_stands_at_the_steps_it_completed_and_says_so_in_samples(process_group: None) -> None:
    runner = broken_off(survivor(), in_step=2)
    replica_progress = runner.replica_progress()
    assert (replica_progress.position, replica_progress.can_be_source, replica_progress.obstacle) == (2, True, None)
    assert replica_progress.words == "no sample lost, 4 in flight are repeated (epoch 1: 8 of 20 samples used)"
    heartbeat = runner.heartbeat()
    assert (heartbeat.epoch, heartbeat.step, heartbeat.phase) == (1, 2, "broken off")
    assert heartbeat.data == SamplesUsed(0, due=20, used=8, in_flight=4)


def test_a_survivor_that_finished_the_call_is_one_ahead_of_one_that_took_all_steps(process_group: None) -> None:
    runner = survivor()
    assert runner.replica_progress().position == 0
    train(runner, 3)
    assert runner.replica_progress().position == 4


def test_the_last_survivor_goes_on_alone_with_all_samples_that_are_left(process_group: None) -> None:
    runner = broken_off(survivor(), in_step=2)
    model = runner.operator.model  # type: ignore[attr-defined]
    facts = runner.regroup(ALONE, StateHandover())
    assert facts.train_data is not None
    answer = resume(runner)
    assert runner.operator.model is model  # type: ignore[attr-defined]
    assert runner.operator.worlds_seen == 1  # type: ignore[attr-defined]
    assert sorted(samples(runner)[4:]) == list(range(8, 20)), "two of each global step before; all of the rest"
    assert answer.num_steps == values(answer)["batch_count"] == 2 + 6
    assert values(answer)["num_samples"] == 4 + 12
    assert runner.epoch == 1


def test_the_batches_of_a_window_that_broke_off_are_counted_once(process_group: None) -> None:
    class InPairs(BreaksOff):
        def accumulate_grad_batches(self, epoch_idx: int) -> int:
            return 2

    runner = broken_off(survivor(InPairs), in_step=3)
    assert runner.replica_progress().position == 2
    runner.regroup(ALONE, StateHandover())
    assert runner.operator.global_step == 2
    answer = resume(runner)
    assert answer.num_steps == values(answer)["batch_count"] == runner.operator.global_step == 2 + 6
    assert values(answer)["num_samples"] == 4 + 12


def test_a_call_that_broke_off_before_its_first_step_is_begun(process_group: None) -> None:
    runner = survivor()
    runner.regroup(ALONE, StateHandover())
    assert resume(runner).num_steps == 10
    assert samples(runner) == list(range(20))


def test_a_call_of_several_passes_goes_on_in_the_one_it_was_in(process_group: None) -> None:
    runner = broken_off(survivor(), in_step=7, num_steps=9)
    runner.regroup(ALONE, StateHandover())
    answer = resume(runner, 9)
    assert (answer.num_steps, answer.epoch_idx, runner.epoch) == (9, 0, 2)
    assert samples(runner)[14:] == [8, 9, 10, 11], "two steps in the second pass, of which eight samples were used"


def test_a_survivor_that_had_answered_answers_the_same_again(process_group: None) -> None:
    runner = survivor()
    answer = train(runner)
    runner.regroup(ALONE, StateHandover())
    assert resume(runner) is answer


def _fails_to_begin(runner: TorchRunner, monkeypatch: pytest.MonkeyPatch, **request: Any) -> None:
    """Let call 2 lose the group while its data connect the ranks."""

    def join(*_: Any) -> None:
        raise torch.distributed.DistNetworkError("the group is gone")

    with monkeypatch.context() as patch:
        patch.setattr(DividedLoaderSource, "join", join)
        patch.setattr(PlainSource, "join", join)
        with pytest.raises(torch.distributed.DistNetworkError):
            train(runner, call_number=2, **request)


def test_a_call_that_failed_before_it_began_is_begun_and_not_answered_by_the_one_before(
    process_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = survivor()
    train(runner, call_number=1)
    num_seen = len(samples(runner))
    _fails_to_begin(runner, monkeypatch)
    assert runner.replica_progress().position == 0
    runner.regroup(ALONE, StateHandover())
    answer = resume(runner, call=2)
    assert (answer.call_number, answer.epoch_idx, answer.num_steps, runner.epoch) == (2, 1, 10, 2)
    assert samples(runner)[num_seen:] == list(range(20))


def test_a_rank_that_a_call_never_reached_begins_it(process_group: None) -> None:
    runner = survivor()
    train(runner, call_number=1)
    runner.regroup(ALONE, StateHandover())
    answer = resume(runner, call=2)
    assert (answer.call_number, answer.epoch_idx, answer.num_steps) == (2, 1, 10)


def test_a_pass_over_data_of_a_call_is_counted_once_however_often_it_fails_to_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = make_runner()
    shard = [(torch.zeros(1, 3), torch.tensor([number]), torch.zeros(1, 1)) for number in range(3)]
    train(runner, call_number=1)
    for _ in range(2):
        _fails_to_begin(runner, monkeypatch, shard=shard)
    answer = train(runner, call_number=2, shard=shard)
    assert (answer.epoch_idx, answer.num_steps, runner.epoch) == (1, 3, 2)


def test_a_survivor_says_between_calls_what_the_last_one_has_used(process_group: None) -> None:
    runner = survivor()
    for num_steps, used in ((None, "epoch 1: 20 of 20"), (2, "epoch 2: 4 of 20")):
        train(runner, num_steps)
        runner.regroup(ALONE, StateHandover())
        assert str(runner.heartbeat().data) == f"{used} samples used"


def test_a_batch_that_had_begun_to_change_the_model_is_no_whole_state(process_group: None) -> None:
    class StepsTwice(BreaksOff):
        def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
            if self.breaks_in == 0:
                self.optimizer.step()
            return super().train_batch(batch, batch_info)

    class Perturbs(BreaksOff):
        """As sharpness-aware minimization does: weights go elsewhere for a second backward pass, and come back."""

        train_batch = LinearOperator.train_batch

        def backward(self, loss: torch.Tensor) -> None:
            with torch.no_grad():
                self._original_models[0].weight.add_(1.0)
            BreaksOff.train_batch(self, (torch.zeros(1, 3), torch.zeros(1), torch.zeros(1, 1)), {})

    assert not broken_off(survivor(StepsTwice), in_step=1).replica_progress().can_be_source
    assert not broken_off(survivor(Perturbs, undo=False), in_step=0).replica_progress().can_be_source
    assert broken_off(survivor(BreaksOff), in_step=1).replica_progress().can_be_source
    runner = survivor(Perturbs)
    before = runner.state()["models"][0]["weight"].clone()
    assert broken_off(runner, in_step=0).replica_progress().can_be_source, "it can be undone"
    runner.regroup(ALONE, StateHandover())
    assert equal(runner.state()["models"][0]["weight"], before)
    assert runner.replica_progress().can_be_source


def test_a_replica_that_took_over_a_whole_state_has_one(process_group: None) -> None:
    class StepsFirst(BreaksOff):
        def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
            self.optimizer.step()
            return super().train_batch(batch, batch_info)

    runner = broken_off(survivor(StepsFirst, undo=False), in_step=1)
    assert not runner.replica_progress().can_be_source
    call = runner._training
    assert call is not None
    runner._take_over(runner._hosted.state.read(), call.state(with_metrics=False))
    assert runner.replica_progress().can_be_source


class OwnLoop(BreaksOff):
    def train_epoch(self, iterator: Any, info: Any = None, **_: Any) -> Any:
        return super().train_epoch(iterator, info)


class OwnLoopThatGoesOn(OwnLoop):
    resumes_epochs = True


class NeverGoesOn(BreaksOff):
    resumes_epochs = False


class NotDivided(BreaksOff):
    def make_loader(self, data: Any, shuffle: bool = False) -> Any:
        return list(super().make_loader(data, shuffle))


@pytest.mark.parametrize(
    ("operator_cls", "expected"),
    [
        (OwnLoop, "`OwnLoop` overrides `train_epoch` and does not set `resumes_epochs`"),
        (OwnLoopThatGoesOn, None),
        (NeverGoesOn, "`NeverGoesOn` sets `resumes_epochs` to False"),
        (NotDivided, "the train loader is not sharded by the library"),
    ],
)
def test_what_cannot_be_gone_on_with_says_why(
    process_group: None, operator_cls: type[BreaksOff], expected: str | None
) -> None:
    found = broken_off(survivor(operator_cls), in_step=1).replica_progress().obstacle
    assert found is None if expected is None else found is not None and expected in found


def test_practice_takes_a_step_and_what_goes_wrong_in_it_is_only_told(
    process_group: None, caplog: pytest.LogCaptureFixture
) -> None:
    infos: list[dict[str, Any]] = []

    class Noting(BreaksOff):
        def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
            infos.append({**batch_info, "samples": batch[0][:, 0].tolist()})
            return super().train_batch(batch, batch_info)

    runner = survivor(Noting)
    runner.warm_up()
    assert [(info["warm_up"], len(info["samples"])) for info in infos] == [(True, 2)]
    assert runner.heartbeat().step == -1
    runner.operator.breaks_in = 0  # type: ignore[attr-defined]
    runner.warm_up()
    assert "warm-up of a new worker failed: DistNetworkError('the group is gone')" in caplog.text


def test_practice_can_be_switched_off(process_group: None) -> None:
    class NoPractice(BreaksOff):
        warms_up = False

        def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
            raise AssertionError("it was called")

    survivor(NoPractice).warm_up()


def test_practice_omits_an_operator_whose_own_loop_takes_other_steps(
    process_group: None, caplog: pytest.LogCaptureFixture
) -> None:
    class OwnSteps(LinearOperator):
        resumes_epochs = True

        def setup(self, config: dict[str, Any]) -> None:
            super().setup(config)
            self.net = self.__dict__.pop("model")

        def train_epoch(self, iterator: Any, info: Any = None, **_: Any) -> Any:
            raise AssertionError("it was called")

    runner = survivor(OwnSteps)
    assert runner.replica_progress().obstacle is None
    runner.warm_up()
    assert caplog.text == ""


def test_practice_changes_what_another_worker_replaces_and_resets_metric_objects(process_group: None) -> None:
    class Measures(BreaksOff):
        def setup(self, config: dict[str, Any]) -> None:
            super().setup(config)
            self.measure = MeanMetric()

        def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
            self.measure.update(3.0)
            return super().train_batch(batch, batch_info)

    runner, source = survivor(Measures), survivor(Measures)
    operator: Any = runner.operator
    weight = operator.model.module.weight.clone()
    runner.warm_up()
    assert not torch.equal(operator.model.module.weight, weight)
    assert operator.measure.update_count == 0
    runner.restore(source.state(), None)
    assert torch.equal(operator.model.module.weight, weight)
    assert equal(runner.state(), source.state())


def test_a_beat_tells_where_the_replica_is(process_group: None) -> None:
    heartbeats: list[Any] = []

    class Beating(BreaksOff):
        def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
            heartbeats.append(runner.heartbeat())
            return super().train_batch(batch, batch_info)

    runner = survivor(Beating, every=2)
    assert (runner.heartbeat().step, runner.heartbeat().phase) == (-1, "between calls")
    train(runner)
    assert [
        (heartbeat.step, heartbeat.phase, heartbeat.num_samples, heartbeat.snapshot) for heartbeat in heartbeats
    ] == [
        (0, "training", 0, 0),
        (1, "training", 2, 0),
        (2, "training", 4, 2),
        (3, "training", 6, 2),
        (4, "training", 8, 4),
    ]
    assert [heartbeat.data.used for heartbeat in heartbeats] == [0, 4, 8, 12, 16], "of both ranks"
    assert {heartbeat.data.in_flight for heartbeat in heartbeats} == {4}
    assert all(earlier.at < later.at for earlier, later in itertools.pairwise(heartbeats))


# ------------------------------------------------------------------------------------------------ held


def held_after(runner: TorchRunner, num_steps: int) -> HeldAtStep:
    """What a call comes to that all ranks agreed to stop after so many steps, as they did in its first one."""

    class Proposing:
        def __call__(self, *_: Any, **__: Any) -> None:
            if runner.heartbeat().step == 0:
                assert runner.propose_hold(num_steps, 0, num_steps) == num_steps
                runner.resolve_hold(num_steps, True)

    handle = runner.operator.model.register_forward_pre_hook(Proposing())  # type: ignore[attr-defined]
    held = runner.train_epoch(EpochRequest(None, {}, False, seed=0))
    handle.remove()
    assert isinstance(held, HeldAtStep)
    assert runner.last_hold() == (num_steps, True)
    return held


def test_a_held_call_stops_between_two_steps_and_goes_on_as_if_nothing_had_been(process_group: None) -> None:
    whole, runner = survivor(), survivor()
    expected = train(whole)
    held = held_after(runner, 3)
    assert (held.step, runner.replica_progress().position) == (3, 3)
    assert (
        runner.replica_progress().words == "no sample lost, 0 in flight are repeated (epoch 1: 12 of 20 samples used)"
    )
    answer = resume(runner)
    assert samples(runner) == samples(whole)
    assert values(answer) == values(expected)
    assert equal(runner.state()["models"], whole.state()["models"])


def test_what_a_rank_measured_that_left_is_counted_once_though_the_group_was_formed_twice(process_group: None) -> None:
    runner, leaving = survivor(), survivor()
    held_after(runner, 3)
    handover = StateHandover(orphans=(held_after(leaving, 3).part.progress,))
    for _ in range(2):
        runner.regroup(ALONE, handover)
    assert values(resume(runner))["num_samples"] == 3 * 2 * 2 + 8


def test_between_calls_and_where_it_could_not_go_on_nobody_stops(process_group: None) -> None:
    runner = survivor()
    assert runner.propose_hold(1, 2, None) is None
    runner.resolve_hold(1, False)
    train(runner)
    assert runner.propose_hold(2, 2, None) is None
    assert runner.last_hold() == (2, False)


# ------------------------------------------------------------------------------------------------ snapshots inside


def part_of_snapshot(runner: TorchRunner, num_steps: int) -> Any:
    train(runner)
    return runner.part_of_snapshot(num_steps)


@pytest.mark.parametrize("num_steps", [2, 5])
def test_a_planned_stop_stays_where_it_is_if_a_rank_was_lost_there(process_group: None, num_steps: int) -> None:
    runner = survivor()
    request = EpochRequest(None, {}, False, seed=0, hold_at=num_steps)
    assert isinstance(runner.train_epoch(request), HeldAtStep)
    runner.replica_progress()
    runner.regroup(World(0, 2), StateHandover())
    again = runner.resume_epoch(request)
    assert isinstance(again, HeldAtStep)
    assert (again.step, again.is_planned, again.part.progress.num_steps) == (num_steps, True, num_steps)
    assert values(resume(runner))["batch_count"] == 5


@pytest.mark.parametrize("num_steps", [2, 4, 5])
@pytest.mark.parametrize("stop", [lambda runner, num: held_after(runner, num).part, part_of_snapshot])
def test_another_process_goes_on_from_the_part_of_a_held_call_or_of_a_snapshot_inside_it(
    process_group: None, stop: Any, num_steps: int
) -> None:
    """Also from one after the last step, which leaves none to take again."""
    whole, first, second = (survivor(every=num_steps) for _ in range(3))
    expected = train(whole)
    part = stop(first, num_steps)
    second.restore_inside(part.shared_state, part.rank_state, part.progress, [part.progress], [part.progress])
    assert second.replica_progress().position == num_steps
    answer = resume(second)
    assert samples(second) == samples(whole)[2 * num_steps :]
    assert values(answer)["batch_count"] == values(expected)["batch_count"] == answer.num_steps == 5
    assert values(answer)["train_loss"] == pytest.approx(values(expected)["train_loss"])
    assert equal(second.state()["models"], whole.state()["models"])
    assert second.epoch == 1


def test_one_worker_goes_on_for_two_with_what_both_had_measured(process_group: None) -> None:
    first = survivor(every=2)
    train(first)
    part = first.part_of_snapshot(4)
    assert part is not None
    other = replace(part, shared_state=None)
    alone = make_runner(BreaksOff)
    both = [part.progress, other.progress]
    alone.restore_inside(part.shared_state, part.rank_state, part.progress, both, both)
    answer = resume(alone)
    assert sorted(samples(alone)) == [16, 17, 18, 19]
    assert (values(answer)["num_samples"], values(answer)["batch_count"]) == (2 * 8 + 4, 5)


def test_only_the_newest_two_parts_are_kept_and_none_for_the_next_call(process_group: None) -> None:
    runner = survivor(every=1)
    train(runner, 4)
    assert [runner.part_of_snapshot(number) is not None for number in (1, 2, 3, 4)] == [False, False, True, True]
    train(runner, 0)
    assert runner.part_of_snapshot(4) is None


class OwnData(LinearOperator):
    """Its validation data are its own affair; they do not hinder an epoch."""

    def make_loader(self, data: Any, shuffle: bool = False) -> Any:
        loader = super().make_loader(data, shuffle)
        return loader if len(data) == 20 else list(loader)


@pytest.mark.parametrize(
    ("operator_cls", "expected"),
    [(OwnLoop, "overrides `train_epoch`"), (NotDivided, "the train loader is not sharded"), (OwnData, None)],
)
def test_no_snapshot_is_taken_inside_what_could_not_be_gone_on_with(
    operator_cls: type[LinearOperator], expected: str | None
) -> None:
    runner = TorchRunner(TorchSettings(operator_cls, {}, recovery=Recovery(snapshot_every_n_steps=2)), ALONE)
    obstacle = runner.setup().epoch_obstacle
    train(runner)
    assert obstacle is None if expected is None else obstacle is not None and expected in obstacle
    assert (runner.part_of_snapshot(4) is None) == (obstacle is not None)


def test_no_snapshot_is_taken_inside_a_dataset_whose_position_nobody_knows() -> None:
    """A call that is run again would begin it anew, on top of what it had taught the model by then."""
    runner = TorchRunner(TorchSettings(LinearOperator, {}, recovery=Recovery(snapshot_every_n_steps=1)), ALONE)
    runner.setup()
    shard = [[(torch.zeros(1, 3), torch.zeros(1), torch.zeros(1, 1))]] * 3
    assert train(runner, shard=shard).num_steps == 3
    assert runner.part_of_snapshot(2) is None


class StopsEarly(LinearOperator):
    def train_epoch(self, iterator: Any, info: Any = None, **_: Any) -> Any:
        next(iterator)
        return {"done": 1}


def test_a_loop_that_stops_early_has_used_what_it_drew() -> None:
    runner = make_runner(StopsEarly)
    assert train(runner).num_steps == 1
    assert runner.state()[RESUME]["position"]["consumed"] == 4
    assert train(runner).num_steps == 1
    assert runner.state()[RESUME]["position"]["consumed"] == 8


# ------------------------------------------------------------------------------------------------ modes


class Distiller(BreaksOff):
    """A student with a frozen batch norm, a teacher, and a third model that no stock method knows."""

    def make_model(self) -> torch.nn.Module:
        student = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
        student[1].eval()
        return student

    def register(self, *, models: Any, **parts: Any) -> Any:
        teacher = torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Dropout()).eval()
        head = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Dropout(), torch.nn.BatchNorm1d(1))
        models, *others = super().register(models=(models, teacher, head), **parts)
        self.models = models
        return models[0], *others

    @property
    def modes(self) -> list[list[bool]]:
        return [[part.training for part in model.modules()] for model in self._original_models]

    def forward(self, features: Any, target: Any) -> tuple[Any, torch.Tensor]:
        self.modes_in_forward = self.modes
        return super().forward(features, target)


class OwnDistiller(Distiller):
    """A loop of its own, which sets no mode."""

    def train_epoch(self, iterator: Iterable[Any], info: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        for batch in iterator:
            self.train_batch(batch, info)
        return {}

    def validate(self, val_iterator: Iterable[Any], info: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        for batch in val_iterator:
            self.validate_batch(batch, info)
        return {}


AS_SET_UP = [[True, True, False, True], [False] * 3, [True] * 4]


def validate(runner: TorchRunner, num_steps: int | None = None) -> dict[str, Any]:
    return values(runner.validate(EpochRequest(num_steps, {}, False, seed=0)))


@pytest.mark.parametrize("operator_cls", [Distiller, OwnDistiller])
def test_evaluation_is_of_all_models_and_training_finds_the_modes_of_setup(operator_cls: type[Distiller]) -> None:
    runner = make_runner(operator_cls)
    operator = runner.operator
    assert isinstance(operator, Distiller)
    for _ in range(2):
        train(runner)
        assert operator.modes_in_forward == AS_SET_UP
        for _ in range(2):
            validate(runner)
            assert operator.modes_in_forward == operator.modes == [[False] * 4, [False] * 3, [False] * 4]
    train(runner)
    assert operator.modes == AS_SET_UP


def test_modes_come_back_also_after_an_evaluation_that_raised() -> None:
    class Raises(Distiller):
        def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
            raise ArithmeticError

    runner = make_runner(Raises)
    with pytest.raises(ArithmeticError):
        validate(runner)
    train(runner)
    assert runner.operator.modes == AS_SET_UP  # type: ignore[attr-defined]


class OwnValidation(LinearOperator):
    def validate(self, val_iterator: Iterable[Any], info: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        return {"outputs": [self.model(batch[0]).sum().item() for batch in val_iterator]}


def test_a_spare_measures_in_a_validation_of_the_users_own_what_the_worker_whose_state_it_has_does() -> None:
    before, inline, beside = validate_on_spare(OwnValidation, {})
    assert beside == inline != before


def test_the_time_of_a_spare_that_has_validated_begins_when_it_joins_a_group() -> None:
    spare = make_runner()
    settings = TorchSettings(LinearOperator, {})
    assert spare.validate_on_loan(1, settings, spare.state(), EpochRequest(None, {}, False, seed=0)) is not None
    of_loan = spare._ledger.reading().of
    spare.regroup(ALONE, StateHandover(0, ()))
    assert spare._ledger.reading().of != of_loan


def test_practice_leaves_the_modes_as_they_are(process_group: None) -> None:
    found: list[Any] = []

    class Noting(Distiller):
        def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
            metrics = super().train_batch(batch, batch_info)
            found.append(self.modes_in_forward)
            return metrics

    runner = survivor(Noting)
    runner.warm_up()
    assert [*found, runner.operator.modes] == [AS_SET_UP, AS_SET_UP]  # type: ignore[attr-defined]


def test_modes_survive_evaluation_and_the_loss_of_a_worker(process_group: None) -> None:
    runner = survivor(Distiller)
    validate(runner)
    broken_off(runner, in_step=2)
    runner.regroup(ALONE, StateHandover())
    resume(runner)
    assert runner.operator.modes_in_forward == runner.operator.modes == AS_SET_UP  # type: ignore[attr-defined]
    assert all(model.training for model in runner.operator._models[::2])


# ------------------------------------------------------------------------------------------------ where validation is


class Leaves(LinearOperator):
    """Leaves an evaluation after some batches, one way or the other."""

    error: Exception | None = None
    after: int | None = None

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        if self.error is not None and batch_info["batch_idx"] == 2:
            error, self.error = self.error, None
            raise error
        return super().validate_batch(batch, batch_info)

    def validate(self, val_iterator: Iterable[Any], info: dict[str, Any] | None = None) -> dict[str, Any]:
        return super().validate(itertools.islice(val_iterator, self.after), info)


def loss_and_samples(runner: TorchRunner) -> tuple[float, int]:
    result = validate(runner)
    return result["val_loss"], result["num_samples"]


@pytest.mark.parametrize("add_dist_sampler", [True, False])
@pytest.mark.parametrize("num_steps", [None, 3])
def test_after_an_exception_evaluation_begins_with_the_first_batch(add_dist_sampler: bool, num_steps: int) -> None:
    runner = TorchRunner(TorchSettings(Leaves, {}, add_dist_sampler=add_dist_sampler), ALONE)
    runner.setup()
    whole = loss_and_samples(runner)
    runner.operator.error = ArithmeticError()  # type: ignore[attr-defined]
    with pytest.raises(ArithmeticError):
        validate(runner, num_steps)
    assert loss_and_samples(runner) == whole


def test_an_evaluation_of_all_that_stops_early_sees_the_same_batches_each_time() -> None:
    runner = make_runner(Leaves)
    whole = loss_and_samples(runner)
    runner.operator.after = 2  # type: ignore[attr-defined]
    first = loss_and_samples(runner)
    assert first[1] == 8
    assert loss_and_samples(runner) == first
    runner.operator.after = None  # type: ignore[attr-defined]
    assert loss_and_samples(runner) == whole


def test_an_evaluation_of_some_batches_leaves_the_others_to_the_next_one() -> None:
    runner = make_runner(Leaves)  # 13 samples in batches of 4
    runner.operator.after = 1  # type: ignore[attr-defined]
    assert validate(runner, 3)["num_samples"] == 4
    runner.operator.after = None  # type: ignore[attr-defined]
    assert validate(runner, 1)["num_samples"] == 4
    assert validate(runner)["num_samples"] == 5
    assert validate(runner)["num_samples"] == 13


def test_an_evaluation_can_be_told_to_start_over() -> None:
    runner = make_runner()
    assert validate(runner, 3)["num_samples"] == 12
    answer = runner.validate(EpochRequest(None, {}, False, seed=0, starts_over=True))
    assert values(answer)["num_samples"] == 13


# ------------------------------------------------------------------------------------------------ padding


class Measuring(LinearOperator):
    """Reports more in training: a ratio of what the stock method reports, and a metric object."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.error = MeanSquaredError()
        self.measured: list[tuple[bool, float]] = []

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        metrics = super().train_batch(batch, batch_info)
        output, target = self.model(batch[0]).detach(), batch[-1]
        self.measured.append((batch_info[IS_PADDING], float((output - target).square().mean())))
        self.error.update(output, target)
        return {**metrics, "share": 1 / metrics["num_samples"], "error": self.error}


class MeasuringInAnOwnLoop(Measuring):
    """Counts by what each batch reports, as loops in guides do."""

    def train_epoch(self, iterator: Any, info: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        meters = AverageMeterCollection(capture_object=capture)
        for batch_idx, batch in enumerate(iterator):
            metrics = self.train_batch(batch, {"batch_idx": batch_idx, IS_PADDING: iterator.is_padding})
            meters.update(metrics, n=metrics.pop("num_samples"))
        return meters.summary()


@pytest.mark.parametrize("operator_cls", [Measuring, MeasuringInAnOwnLoop])
def test_padding_counts_nowhere(process_group: None, operator_cls: type[Measuring]) -> None:
    # The second of two ranks, which has four of the first eight samples, and none in the step of the ninth.
    runner = TorchRunner(TorchSettings(operator_cls, {"num_samples": 9}), World(rank=1, size=2, local_size=2))
    runner.setup()
    operator = runner.operator
    assert isinstance(operator, Measuring)
    for _ in range(2):
        result = values(train(runner))
        (own, error), (repeated, _) = operator.measured[-2:]
        assert (own, repeated) == (False, True)
        assert (result["num_samples"], result["share"], result["error"]) == (4, 0.25, pytest.approx(error))
    assert "train_batch" not in vars(operator)


def test_a_state_has_the_size_of_batches_that_was_found_as_a_hint_for_trainers_that_look_for_one() -> None:
    def runner_with(micro_batch_size: Any) -> TorchRunner:
        settings = TorchSettings(LinearOperator, {}, batch_options=BatchOptions(True, micro_batch_size))
        runner = TorchRunner(settings, ALONE)
        runner.setup()
        return runner

    def train(runner: TorchRunner, largest_batch: int | None = None) -> tuple[int, int | None]:
        answer = runner.train_epoch(EpochRequest(2, {}, False, 5, largest_batch=largest_batch))
        assert isinstance(answer, EpochAnswer)
        assert answer.metrics is not None
        return answer.metrics["batch_count"], answer.largest_batch

    first = runner_with("auto")
    assert train(first) == (2, None)
    assert "largest_batch" not in first.state()[RESUME]
    assert train(first, 2) == (4, 2)
    state = copy.deepcopy(first.state())
    assert state[RESUME]["largest_batch"] == 2
    for micro_batch_size, expected in (("auto", (4, 2)), (None, (2, None))):
        other = runner_with(micro_batch_size)
        other.restore(state, None)
        assert train(other) == expected
