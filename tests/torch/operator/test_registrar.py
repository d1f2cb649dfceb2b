"""What is registered: how it is checked, prepared, divided, and handed back.

Covers the views of `raysgd.torch.training_operator`, too.
"""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from raysgd.core.engine.shared.types import World
from raysgd.core.text.log_lines import Once
from raysgd.exceptions import InvalidRegistrationError
from raysgd.torch.objects.precision import Precision, make_precision
from raysgd.torch.operator.registrar import compile_options
from raysgd.torch.operator.settings import OperatorContext, TorchSettings
from raysgd.torch.parallel.options import StepOptions
from raysgd.torch.parallel.sync import GradientSync
from raysgd.torch.step.gradients import Gradients
from raysgd.trainer.configuration import BatchOptions
from raysgd.trainer.worker.worker_callbacks import InstalledCallbacks
from tests.torch.operators_for_tests import CPU, Bare, LinearOperator, a_model, an_optimizer, make


def test_components_come_back_as_they_were_given() -> None:
    model, optimizer, criterion = a_model(), an_optimizer(), torch.nn.MSELoss()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optional = {"criterion": criterion, "schedulers": scheduler}
    for models, optimizers in ((model, optimizer), ([model], (optimizer,)), ((model,), [optimizer])):
        for names in ([], ["criterion"], ["schedulers"], ["criterion", "schedulers"]):
            more = {name: optional[name] for name in names}
            found = make(Bare, scheduler_step_freq="manual").register(models=models, optimizers=optimizers, **more)
            assert found == (models, optimizers, *more.values())


def test_what_is_registered_has_the_names_of_old() -> None:
    operator = make(LinearOperator)
    assert operator._original_models == [operator.model]
    assert operator._models == [operator.model]
    assert operator._optimizers == [operator.optimizer]
    assert operator._schedulers == []
    assert operator._criterion is operator.criterion
    assert operator._train_loader is operator.train_loader
    assert operator._validation_loader is operator.validation_loader


@pytest.mark.parametrize("container", [lambda items: dict(enumerate(items)).values(), set, iter])
def test_several_models_of_any_iterable_come_back_as_a_list(container: Any) -> None:
    models = [a_model(), a_model()]
    found, _ = make(Bare).register(models=container(models), optimizers=an_optimizer(models[0]))
    assert type(found) is list
    assert {*found} == {*models}


@pytest.mark.parametrize("make_model", [torch.nn.Sequential, torch.nn.ModuleList])
@pytest.mark.parametrize("num_parts", [0, 2])
def test_an_iterable_model_is_one_model(make_model: Any, num_parts: int) -> None:
    operator = make(Bare)
    parts = [a_model() for _ in range(num_parts)]
    model = make_model(*parts) if make_model is torch.nn.Sequential else make_model(parts)
    registered, _ = operator.register(models=model, optimizers=an_optimizer())
    assert registered is model
    assert operator._original_models == [model]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (None, "NoneType"),
        ("model", "str"),
        (torch.zeros(2), "Tensor"),
        ([torch.nn.Linear(1, 1), "model"], "str"),
        ({"model": torch.nn.Linear(1, 1)}, "dict"),
        (torch.nn.Linear, "the class `Linear` instead of an object of it"),
        ([], "nothing"),
    ],
)
def test_what_is_no_model_is_refused_by_name(given: Any, named: str) -> None:
    for kind in (InvalidRegistrationError, AssertionError, TypeError, ValueError):  # of old, too
        with pytest.raises(kind, match=named):
            make(Bare).register(models=given, optimizers=an_optimizer())


def test_models_that_a_second_registration_leaves_out_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    operator, first, second = make(Bare), a_model(), a_model()
    operator.register(models=first, optimizers=an_optimizer(first))
    operator.register(models=(first, second), optimizers=an_optimizer(first))
    assert not caplog.records
    operator.register(models=second, optimizers=an_optimizer(second))
    assert "`register` was called again" in caplog.text


def test_schedulers_need_to_know_when_to_step_also_an_empty_container_of_them() -> None:
    operator = make(Bare, scheduler_step_freq="manual")
    assert operator.register(models=a_model(), optimizers=an_optimizer(), schedulers=())[2] == ()
    assert len(operator.register(models=a_model(), optimizers=an_optimizer(), schedulers=False)) == 2
    for schedulers in ([], torch.optim.lr_scheduler.StepLR(an_optimizer(), 1)):
        with pytest.raises(ValueError, match="scheduler_step_freq"):
            make(Bare).register(models=a_model(), optimizers=an_optimizer(), schedulers=schedulers)


def test_unknown_keywords_are_refused_and_loaders_are_shown_their_place() -> None:
    with pytest.raises(TypeError, match="`schedule`"):
        make(Bare).register(models=a_model(), optimizers=an_optimizer(), schedule=1)
    with pytest.raises(TypeError, match="register_data"):
        make(Bare).register(models=a_model(), optimizers=an_optimizer(), train_loader=[1])


def test_an_optimizer_needs_no_more_than_steps() -> None:
    class Duck:
        def step(self) -> None: ...

    operator = make(Bare)
    duck = Duck()
    assert operator.register(models=a_model(), optimizers=duck)[1] is duck
    assert operator._optimizers == [duck]
    assert operator.register(models=a_model(), optimizers=(duck, duck))[1] == (duck, duck)


def test_mixed_precision_is_at_work_after_registering_only() -> None:
    operator = make(Bare, precision=make_precision(True, CPU))
    assert (operator.use_fp16, operator.use_fp16_native, operator._amp) == (False, False, None)
    operator.register(models=a_model(), optimizers=an_optimizer())
    assert (operator.use_fp16, operator.use_fp16_native, operator.use_fp16_apex) == (True, True, False)
    with operator._amp.autocast():
        assert operator._amp_scaler.scale(torch.ones(1)) == 1


def test_without_mixed_precision_there_is_none() -> None:
    operator = make(LinearOperator)
    assert (operator.use_fp16, operator._amp_scaler) == (False, None)
    with operator._amp.autocast(), operator._amp.autocast(enabled=True), operator.autocast():
        assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("loader", [[1, 2], range(3), iter([1]), {"a": 1}.values()])
def test_any_iterable_may_be_a_loader(loader: Any) -> None:
    operator = make(Bare)
    operator.register_data(train_loader=loader, validation_loader=loader)
    assert operator.train_loader is operator.validation_loader is loader


def test_loaders_may_be_missing() -> None:
    operator = make(Bare)
    operator.register_data()
    assert (operator.train_loader, operator.validation_loader) == (None, None)


def test_loaders_can_be_looked_into_by_hand_before_the_first_pass() -> None:
    class Looks(Bare):
        def setup(self, config: dict[str, Any]) -> None:
            loader = DataLoader(torch.arange(12), batch_size=2, shuffle=True)
            self.register_data(train_loader=loader, validation_loader=loader)
            self.first = next(iter(self.train_loader))

    ranks = [make(Looks, world=World(rank=rank, size=2)) for rank in range(2)]
    assert [len(operator.first) for operator in ranks] == [2, 2]
    for name in ("train_loader", "validation_loader"):
        seen = [number for operator in ranks for batch in getattr(operator, name) for number in batch.tolist()]
        assert sorted(seen) == list(range(12))


def test_a_loader_that_user_code_keeps_under_the_same_name_stays() -> None:
    class Keeps(Bare):
        def setup(self, config: dict[str, Any]) -> None:
            self.train_loader = ["mine"]
            self.register_data(train_loader=[1, 2])

    operator = make(Keeps)
    assert operator.train_loader == ["mine"]
    operator.train_loader = ["changed"]
    assert operator.train_loader == ["changed"]


def test_the_loader_of_a_rank_has_the_length_of_its_share() -> None:
    operator = make(LinearOperator, world=World(rank=1, size=2))
    assert (len(operator.train_loader), len(operator.validation_loader)) == (3, 2)
    whole = make(LinearOperator, world=World(rank=1, size=2), add_dist_sampler=False)
    assert (len(whole.train_loader), len(whole.validation_loader)) == (5, 4)


def test_whoever_expects_a_division_and_does_not_get_it_is_warned_once(caplog: pytest.LogCaptureFixture) -> None:
    class Indivisible(Bare):
        def setup(self, config: dict[str, Any]) -> None:
            self.register_data(train_loader=DataLoader(TensorDataset(torch.zeros(4)), batch_size=None))

    for rank in range(2):
        make(Indivisible, world=World(rank=rank, size=2))
    make(Indivisible)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "the train loader is not sharded" in caplog.text


def test_batch_norms_become_synchronized_ones_with_the_same_parameters() -> None:
    for world, kind in ((World(0, 2), torch.nn.SyncBatchNorm), (World(0, 1), torch.nn.BatchNorm1d)):
        operator = make(Bare, world=world, step_options=StepOptions(sync_batchnorm=True))
        model = torch.nn.Sequential(a_model(), torch.nn.BatchNorm1d(1))
        names = list(model.state_dict())
        optimizer = an_optimizer(model)
        registered, _ = operator.register(models=model, optimizers=optimizer)
        assert type(registered[1]) is kind
        assert list(registered.state_dict()) == names
        stepped = optimizer.param_groups[0]["params"]
        assert all(a is b for a, b in zip(registered.parameters(), stepped, strict=True))


def test_what_stock_code_acts_on_says_which_optimizer_a_call_is_for_until_it_is_done() -> None:
    usual, given = an_optimizer(), an_optimizer()
    parts = Precision(), GradientSync(), StepOptions(), InstalledCallbacks(), Once()
    steps = Gradients(SimpleNamespace(optimizer=usual), *parts)
    steps.watch([usual, an_optimizer()])
    with steps.acting_on_usual():
        assert steps.chosen("backward", given) == [given], "an argument says it first"
        with suppress(KeyError), steps.acting_on_usual():
            raise KeyError
        assert steps.chosen("backward", None) == [usual]
        assert steps.registered(None) == [usual]
    assert steps.registered(None) == []
    with pytest.raises(ValueError, match="2 optimizers are registered"):
        steps.chosen("optimizer_step", None)


@pytest.mark.parametrize(
    ("compiles", "splits", "num_workers", "options"),
    [
        (False, True, 2, None),
        (True, True, 2, {"dynamic": True}),
        (True, False, 2, {}),
        (True, True, 1, {}),
        ({"mode": "max-autotune", "dynamic": False}, True, 2, {"mode": "max-autotune", "dynamic": False}),
    ],
)
def test_models_whose_shares_may_grow_are_compiled_for_all_sizes(
    compiles: Any, splits: bool, num_workers: int, options: Any
) -> None:
    chosen = {"step_options": StepOptions(compile=compiles), "batch_options": BatchOptions(splits)}
    settings = TorchSettings(LinearOperator, {}, **chosen)
    assert compile_options(OperatorContext(settings, World(0, num_workers), torch.device("cpu"))) == options
