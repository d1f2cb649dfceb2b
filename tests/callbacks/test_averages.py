from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raysgd.callbacks import EMA, SWA, Callback, Run
from raysgd.exceptions import CallbackError
from raysgd.torch import TorchTrainer, TrainingOperator
from raysgd.torch.checkpoints import checkpoint_file
from tests.torch.operators_for_tests import BatchNormOperator, LinearOperator, OwnBatchOperator, equal

Make = Callable[..., TorchTrainer]


def weights_after_steps(num_epochs: int, **options: Any) -> list[torch.Tensor]:
    """The weights at the beginning and after each step, from PyTorch alone."""
    seen = []

    class Watching(LinearOperator):
        def setup(self, config: dict[str, Any]) -> None:
            super().setup(config)
            seen.append(self.model.weight.detach().clone())

        def optimizer_step(self, optimizer: Any = None) -> None:
            before = self.model.weight.detach().clone()
            super().optimizer_step(optimizer)
            if not torch.equal(before, self.model.weight):
                seen.append(self.model.weight.detach().clone())

    with TorchTrainer(training_operator_cls=Watching, use_local=True, **options) as trainer:
        for _ in range(num_epochs):
            trainer.train()
    return seen


def averaged(weights: list[torch.Tensor], decay: float) -> torch.Tensor:
    average = weights[0].clone()
    for each in weights[1:]:
        average = decay * average + (1 - decay) * each
    return average


class SeveralSteps(LinearOperator):
    """Takes three steps on each batch, in a loop that bypasses `train_batch`."""

    def train_epoch(self, iterator: Any) -> dict[str, Any]:  # type: ignore[override]
        self.steps = [self.model.weight.detach().clone()]
        for features, _, target in iterator:
            for _ in range(3):
                self.optimizer.zero_grad()
                self.criterion(self.model(features), target).backward()
                self.optimizer.step()
                self.steps.append(self.model.weight.detach().clone())
        return {}


class Pair(TrainingOperator):
    """Two models, the second of which takes two steps on each batch."""

    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(0)
        models = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        self.models, self.optimizers = self.register(models=models, optimizers=optimizers)
        self.model = self.models[0]
        self.register_data(train_loader=torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=2))
        self.steps = [[model.weight.detach().clone()] for model in self.models]

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        for index in (0, 1, 1):
            loss = self.models[1](self.models[0](batch)).square().mean()
            self.backward(loss, optimizer=self.optimizers[index])
            self.optimizer_step(self.optimizers[index])
            self.steps[index].append(self.models[index].weight.detach().clone())
        return {"train_loss": loss.detach(), "num_samples": len(batch)}


class TwoOptimizers(BatchNormOperator):
    """One model whose matrices and vectors have an optimizer each."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        of_matrices = torch.optim.SGD([p for p in self.model.parameters() if p.ndim > 1], lr=0.05)
        of_vectors = torch.optim.SGD([p for p in self.model.parameters() if p.ndim == 1], lr=0.05)
        self.model, self.optimizers = self.register(models=self.model, optimizers=[of_vectors, of_matrices])

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        features, _, target = batch
        self.backward(self.criterion(self.model(features), target), optimizer=self.optimizers)
        self.optimizer_step(self.optimizers)
        return {"num_samples": len(target)}


class WithoutARegisteredOptimizer(OwnBatchOperator):
    """Steps an optimizer that the library does not know."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)


class OwnKindOfOptimizer(OwnBatchOperator):
    """Has an optimizer that tells of no steps."""

    def register(self, *, models: Any, optimizers: Any, **parts: Any) -> Any:
        mine = SimpleNamespace(
            step=optimizers.step,
            zero_grad=optimizers.zero_grad,
            param_groups=optimizers.param_groups,
            state_dict=optimizers.state_dict,
            load_state_dict=optimizers.load_state_dict,
        )
        return super().register(models=models, optimizers=mine, **parts)


def near(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.allclose(left, right, rtol=0, atol=1e-6)


class TestEMA:
    @pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}])
    def test_is_the_average_of_all_steps(self, make_local: Make, options: dict[str, Any]) -> None:
        ema, trainer = EMA(decay=0.8), make_local(**options)
        trainer.fit(2, callbacks=[ema])
        model = ema.get_model(trainer)
        assert near(model.weight, averaged(weights_after_steps(2, **options), 0.8))
        assert not near(model.weight, trainer.get_model().weight)

    def test_counts_each_step_on_a_batch(self, make_local: Make) -> None:
        ema, trainer = EMA(decay=0.8), make_local(SeveralSteps)
        trainer.fit(1, callbacks=[ema])
        steps = trainer.get_local_operator().steps  # type: ignore[attr-defined]
        assert len(steps) == 16
        assert near(ema.get_model(trainer).weight, averaged(steps, 0.8))

    @pytest.mark.parametrize("is_fused", [False, True])
    def test_leaves_out_steps_that_mixed_precision_skips(self, make_local: Make, is_fused: bool) -> None:
        class Overflowing(LinearOperator):
            def register(self, *, models: Any, optimizers: Any, **parts: Any) -> Any:
                own = torch.optim.SGD(models.parameters(), lr=0.05, fused=is_fused)
                return super().register(models=models, optimizers=own, **parts)

            def forward(self, features: Any, target: Any) -> Any:
                output, loss = super().forward(features, target)
                return output, loss * (float("inf") if self.global_step == 1 else 1)

            def optimizer_step(self, optimizer: Any = None) -> None:
                before = self.model.weight.detach().clone()
                super().optimizer_step(optimizer)
                if not torch.equal(before, self.model.weight):
                    self.taken = [*getattr(self, "taken", [before]), self.model.weight.detach().clone()]

        ema, trainer = EMA(decay=0.8), make_local(Overflowing, precision="fp16")
        trainer.fit(1, callbacks=[ema])
        taken = trainer.get_local_operator().taken  # type: ignore[attr-defined]
        assert near(ema.get_model(trainer).weight, averaged(taken, 0.8))
        assert 1 < len(taken) < 6

    def test_follows_for_each_weight_the_optimizer_that_trains_it(self, make_local: Make) -> None:
        ema, trainer = EMA(decay=0.5), make_local(Pair)
        trainer.fit(1, callbacks=[ema])
        steps = trainer.get_local_operator().steps  # type: ignore[attr-defined]
        for weights, average in zip(steps, ema.get_model(trainer), strict=True):
            assert near(average.weight, averaged(weights, 0.5))

    def test_of_one_model_with_two_optimizers_is_that_with_one(self, make_local: Make) -> None:
        models = []
        for operator_cls in (BatchNormOperator, TwoOptimizers):
            ema, trainer = EMA(decay=0.5), make_local(operator_cls)
            trainer.fit(1, callbacks=[ema])
            models.append(ema.get_model(trainer).state_dict())
        assert models[0].keys() == models[1].keys()
        assert all(near(models[0][name], models[1][name]) for name in models[0])

    def test_is_refused_where_steps_cannot_be_seen(self, make_local: Make) -> None:
        with pytest.raises(CallbackError, match=r"cannot see the steps of the registered ones \(SimpleNamespace\)"):
            make_local(OwnKindOfOptimizer).fit(1, callbacks=[EMA()])

    def test_warns_where_no_registered_optimizer_steps(
        self, make_local: Make, caplog: pytest.LogCaptureFixture
    ) -> None:
        make_local(WithoutARegisteredOptimizer).fit(1, callbacks=[EMA()])
        assert "`EMA` saw no step of a registered optimizer in this epoch" in caplog.text

    def test_stays_with_its_decay_whatever_the_order(self, make_local: Make, tmp_path: Path) -> None:
        slow, fast, trainer = EMA(decay=0.99), EMA(decay=0.1), make_local()
        trainer.fit(1, callbacks=[slow, fast])
        trainer.save(tmp_path / "file")
        trainer.fit(1, callbacks=[fast, slow])
        other = make_local()
        other.fit(2, callbacks=[EMA(decay=0.1), EMA(decay=0.99)], resume_from=tmp_path / "file")
        for decay in (0.1, 0.99):
            expected = averaged(weights_after_steps(2), decay)
            assert all(near(EMA(decay).get_model(each).weight, expected) for each in (trainer, other))

    def test_of_the_same_kind_is_refused_twice(self, make_local: Make) -> None:
        with pytest.raises(ValueError, match=r"2 of `EMA\(decay=0.9\)`, whose states"):
            make_local().fit(1, callbacks=[EMA(0.9), EMA(0.9)])

    def test_can_be_put_in_the_place_of_the_weights_for_a_while(self, make_local: Make) -> None:
        ema, trainer = EMA(decay=0.8), make_local()
        trainer.fit(2, callbacks=[ema])
        before = copy.deepcopy(trainer.get_model())
        own = trainer.validate()["val_loss"]
        with ema.swap(trainer):
            inside = copy.deepcopy(trainer.get_model())
            assert trainer.validate()["val_loss"] != pytest.approx(own, abs=1e-6)
        assert near(inside.weight, ema.get_model(trainer).weight)
        assert torch.equal(trainer.get_model().weight, before.weight)

    def test_can_be_used_while_the_run_goes_on(self, make_local: Make) -> None:
        class Validating(Callback):
            found: torch.Tensor

            def on_result(self, run: Run, result: dict[str, Any]) -> None:
                with ema.swap(run.trainer):
                    Validating.found = run.trainer.get_model(to_cpu=True).weight  # type: ignore[union-attr]

        ema, trainer = EMA(decay=0.8), make_local()
        trainer.fit(2, callbacks=[Validating(), ema])
        expected = averaged(weights_after_steps(2), 0.8)
        assert near(Validating.found, expected)
        assert near(ema.get_model(trainer).weight, expected)

    def test_of_statistics_of_batch_norms(self, make_local: Make) -> None:
        ema, trainer = EMA(decay=0.5), make_local(BatchNormOperator)
        trainer.fit(1, callbacks=[ema])
        own, average = trainer.get_model()[1], ema.get_model(trainer)[1]
        assert not near(own.running_mean, average.running_mean)
        assert own.num_batches_tracked == average.num_batches_tracked == 5

    def test_of_weights_in_few_bits_moves(self, make_local: Make) -> None:
        class Coarse(LinearOperator):
            def make_model(self) -> torch.nn.Module:
                return super().make_model().bfloat16()

            def prepare_batch(self, batch: Any) -> Any:
                (features,), target = super().prepare_batch(batch)
                return (features.bfloat16(),), target.bfloat16()

        ema, trainer = EMA(decay=0.999), make_local(Coarse)
        trainer.fit(1, callbacks=[ema])
        [weights] = trainer.state_dict()["callbacks"]["EMA(decay=0.999)"]["weights"]
        assert weights["weight"].dtype == torch.float32
        assert ema.get_model(trainer).weight.dtype == torch.bfloat16


class TestSWA:
    def test_is_the_mean_over_epochs(self, make_local: Make) -> None:
        class Collecting(Callback):
            weights: list[torch.Tensor]

            def on_run_begin(self, run: Run) -> None:
                self.weights = []

            def on_result(self, run: Run, result: dict[str, Any]) -> None:
                self.weights.append(run.trainer.get_model(to_cpu=True).weight.detach())  # type: ignore[union-attr]

        swa, collecting, trainer = SWA(start_epoch=2, every_n_epochs=2), Collecting(), make_local()
        trainer.fit(5, callbacks=[swa, collecting])
        mean = (collecting.weights[1] + collecting.weights[3]) / 2
        assert near(swa.get_model(trainer).weight, mean)

    def test_takes_the_weights_after_a_loop_of_the_user(self, make_local: Make) -> None:
        swa, trainer = SWA(start_epoch=2), make_local(SeveralSteps)
        trainer.fit(2, callbacks=[swa])
        assert near(swa.get_model(trainer).weight, trainer.get_model().weight)

    def test_has_nothing_before_its_first_epoch(self, make_local: Make) -> None:
        swa, trainer = SWA(start_epoch=2), make_local()
        trainer.fit(1, callbacks=[swa])
        with pytest.raises(RuntimeError, match=r"`SWA\(start_epoch=2, every_n_epochs=1\)` has averaged nothing yet"):
            swa.get_model(trainer)
        trainer.fit(1, callbacks=[swa])
        assert near(swa.get_model(trainer).weight, trainer.get_model().weight)


DAMAGES: list[Callable[[dict[str, Any]], object]] = [
    lambda state: state["weights"][0].pop("weight"),
    lambda state: state["weights"][0].update(weight=torch.zeros(1)),
    lambda state: state["weights"][0].update(weight=torch.zeros(1, 3, dtype=torch.float64)),
    lambda state: state["weights"][0].update(weight=torch.zeros(1, 3, device="meta")),
    lambda state: state["weights"][0].update(weight=3),
    lambda state: state["weights"][0].update(other=torch.zeros(1, 3)),
    lambda state: state["weights"].append({}),
    lambda state: state.update(weights=[5]),
    lambda state: state.update(weights=None),
    lambda state: state.pop("weights"),
]


def damaged_file(make_local: Make, callback: Any, damage: Callable[[dict[str, Any]], object], path: Path) -> Path:
    trainer = make_local()
    trainer.fit(1, callbacks=[callback], progress=False)
    trainer.save(path)
    state = checkpoint_file.read(path)
    [averages] = state["callbacks"].values()
    damage(averages)
    checkpoint_file.write(path, state)
    return path


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("make", [lambda: EMA(0.5), lambda: SWA()])
def test_averages_that_do_not_fit_the_models_change_nothing(
    make: Callable[[], Any], damage: Callable[[dict[str, Any]], object], make_local: Make, tmp_path: Path
) -> None:
    path = damaged_file(make_local, make(), damage, tmp_path / "file")
    trainer = make_local(config={"seed": 1})
    before = trainer.state_dict()["models"]
    with pytest.raises(ValueError, match="averaged weights does not match, so nothing was loaded"):
        trainer.fit(2, callbacks=[make()], resume_from=path, progress=False)
    assert equal(trainer.state_dict()["models"], before)


def test_averages_that_do_not_fit_the_models_are_refused_when_they_are_needed(make_local: Make, tmp_path: Path) -> None:
    path = damaged_file(make_local, EMA(0.5), lambda state: state["weights"][0].clear(), tmp_path / "file")
    trainer = make_local()
    trainer.load(path)  # without a callback that averages
    for needs in (lambda: EMA(0.5).get_model(trainer), lambda: trainer.fit(1, callbacks=[EMA(0.5)], progress=False)):
        with pytest.raises(ValueError, match="averaged weights does not match"):
            needs()


@pytest.mark.parametrize("count", [-1, torch.ones(1), "1", None, 2**60])
def test_counts_of_epochs_that_are_none_change_nothing(count: Any, make_local: Make, tmp_path: Path) -> None:
    path = damaged_file(make_local, SWA(), lambda state: state.update(num_updates=count), tmp_path / "file")
    trainer = make_local(config={"seed": 1})
    before = trainer.state_dict()["models"]
    with pytest.raises(ValueError, match="its counts are"):
        trainer.fit(2, callbacks=[SWA()], resume_from=path, progress=False)
    assert equal(trainer.state_dict()["models"], before)


@pytest.mark.parametrize("operator_cls", [LinearOperator, BatchNormOperator])
def test_averages_of_another_trainer_are_loaded(operator_cls: type, make_local: Make) -> None:
    trainer, other = make_local(operator_cls), make_local(operator_cls)
    for each in (trainer, other):
        each.fit(2, callbacks=[EMA(0.5), SWA(start_epoch=2)], progress=False)
    other.load_state_dict(trainer.state_dict())
    for each in (trainer, other):
        each.fit(1, callbacks=[EMA(0.5), SWA(start_epoch=2)], progress=False)
    assert equal(trainer.state_dict()["callbacks"], other.state_dict()["callbacks"])


def test_models_that_are_divided_are_refused() -> None:
    operator = SimpleNamespace(_raysgd=SimpleNamespace(parallel=SimpleNamespace(is_sharded=True)))
    with pytest.raises(ValueError, match='`strategy="fsdp"` shards them: use `strategy="ddp"`'):
        EMA().on_begin(operator)


@pytest.mark.parametrize("decay", [1, -0.1, "high", float("nan")])
def test_a_decay_is_a_number_below_one(decay: Any) -> None:
    with pytest.raises(ValueError, match=f"`decay={decay!r}`"):
        EMA(decay)


@pytest.mark.parametrize("name", ["start_epoch", "every_n_epochs"])
def test_epochs_are_counted_from_one(name: str) -> None:
    with pytest.raises(ValueError, match=f"`{name}=0`"):
        SWA(**{name: 0})
