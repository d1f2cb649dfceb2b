"""Programs of users, as type checkers see them. `make typecheck` reads this file; nothing runs it.

Pyright (in its default mode) and mypy (strictly) find nothing in the programs, which are free of `ignore`, and an error
in each line that is marked with one of them for each: an `ignore` that is not needed is an error itself.

The models that `get_model` returns have no type: PyTorch declares every attribute of a `Module` as a tensor or a
module, so calls of methods that users define on their own models would be refused. Nor has what `predict` returns,
which depends on the data.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import assert_type

import raysgd
from raysgd import TFTrainer, TorchTrainer, TrainingOperator, train
from raysgd.callbacks import Callback, Checkpointing, EarlyStopping, Run, WorkerCallback
from raysgd.core.history.history import History
from raysgd.core.numbers.results import Metrics
from raysgd.operators import ClassificationOperator
from raysgd.tf import TrainingOperator as TFOperator
from raysgd.train import RunConfig, ScalingConfig, Trainer
from raysgd.train.torch import TorchTrainer as FitTrainer
from raysgd.train.torch import prepare_data_loader, prepare_model


class Net(torch.nn.Module):
    """A model with a method of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def penalty(self) -> float:
        return 0.0


class Line(TrainingOperator):
    """A class with overrides that take what they need."""

    def setup(self, config: dict[str, Any]) -> None:
        model = Net()
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=torch.optim.SGD(model.parameters(), lr=config["lr"]), criterion=torch.nn.MSELoss()
        )
        x = torch.linspace(0, 1, 64).reshape(-1, 1)
        self.register_data(train_loader=DataLoader(TensorDataset(x, 2 * x), batch_size=8))

    def train_epoch(self, iterator: Any, info: dict[str, Any]) -> dict[str, Any]:
        return {**super().train_epoch(iterator, info), "penalty": self.model.penalty()}

    def train_batch(self, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, Any]:
        return super().train_batch(batch, {})

    def forward(self, features: tuple[torch.Tensor], target: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.criterion(self.model(*features), target)
        return loss

    def optimizer_step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        super().optimizer_step()

    def validate(self, val_iterator: Any) -> dict[str, Any]:
        return super().validate(val_iterator)


class Unannotated(TrainingOperator):
    """The same, as the pages have it."""

    def setup(self, config):  # type: ignore[no-untyped-def]
        model = torch.nn.Linear(1, config["width"])
        optimizer = torch.optim.Adam(model.parameters())
        self.model, self.optimizer, self.scheduler = self.register(
            models=[model], optimizers=optimizer, schedulers=torch.optim.lr_scheduler.StepLR(optimizer, 1)
        )
        assert_type(self.model, list[torch.nn.Linear])

    def train_epoch(self, iterator, info):  # type: ignore[no-untyped-def]
        return super().train_epoch(iterator, info)

    def forward(self, features, target):  # type: ignore[no-untyped-def]
        return self.model[0](*features), torch.zeros(())

    def optimizer_step(self):  # type: ignore[no-untyped-def]
        super().optimizer_step()


class Notes(Callback):
    """What a callback may add."""

    def on_result(self, run: Run, result: dict[str, Any]) -> None:
        result["epoch_of_run"] = run.epoch


class InWorker(WorkerCallback):
    """One in the workers."""

    def on_gradients(self, operator: Any, optimizer: Any) -> None:
        print(operator.global_step)


def of_torch() -> None:
    """A program with a class."""
    with TorchTrainer(Line, config={"lr": 0.1}, num_workers=2) as trainer:
        assert_type(trainer, TorchTrainer[Line])
        assert_type(trainer.train(), Metrics)
        assert_type(trainer.train(10, reduce_results=True).num_samples, float)
        assert_type(trainer.train()["train_loss"], Any)
        assert_type(trainer.validate(dataset=[]), Metrics)
        assert_type(trainer.test([]), Metrics)
        assert_type(trainer.fit(3, callbacks=[Notes(), InWorker(), Checkpointing("runs")]), History)
        assert_type(trainer.train(reduce_results=False), Any)
        assert_type(trainer.get_local_operator().model, Net)
        assert_type(trainer.apply_all_operators(lambda operator: operator.model.penalty()), list[float])
        trainer.get_model().my_own_method()
        trainer.save("line.pt")
    any_kind(TorchTrainer(training_operator_cls=Unannotated, use_local=True))
    TorchTrainer(training_operator_cls=ClassificationOperator, **dict[str, Any](num_workers=2))


def any_kind(trainer: TorchTrainer) -> None:
    """What takes a trainer of any class."""
    trainer.get_local_operator().anything()
    for row in trainer.epochs(2):
        print(row["train_loss"])


class Keras(TFOperator):
    """A class with overrides, for TensorFlow."""

    def setup(self, config: dict[str, Any]) -> None:
        self.model, self.optimizer, self.loss = self.register(models=config["model"], loss=config["loss"])

    def train_epoch(self, iterator: Any, info: dict[str, Any]) -> dict[str, Any]:
        return super().train_epoch(iterator, info)

    def train_batch(self, batch: Any) -> dict[str, Any]:
        return super().train_batch(batch, {})


def of_tensorflow(model_creator: Any) -> None:
    """A program with functions for Keras, and one with a class."""
    trainer = TFTrainer(model_creator, lambda config: (config["data"], None), num_replicas=2)
    assert_type(trainer.train(), Metrics)
    assert_type(trainer.validate().batch_count, float)
    assert_type(trainer.fit(3), History)
    with TFTrainer(training_operator_cls=Keras) as of_class:
        assert_type(of_class.get_local_operator(), Keras)


def of_functions() -> None:
    """A program with a function, on workers that stay."""

    def train_func(config: dict[str, Any]) -> float:
        model = prepare_model(torch.nn.Linear(1, 1))
        loader = prepare_data_loader(DataLoader(config["data"]))
        for epoch in range(config["num_epochs"]):
            loader.sampler.set_epoch(epoch)
            for x, y in loader:
                loss = torch.nn.functional.mse_loss(model(x), y)
                train.report(loss=loss.item())
        return 0.0

    trainer = Trainer("torch", num_workers=(1, 2))
    trainer.start()
    assert_type(trainer.run(train_func, {"num_epochs": 3}), list[float])
    for reports in raysgd.train.Trainer("torch").run_iterator(train_func):
        print(reports[0]["loss"])
    trainer.shutdown()


def of_fit() -> None:
    """A program with a function, which `fit` runs once."""

    def train_loop() -> None:
        train.report({"loss": 0.0})

    result = FitTrainer(
        train_loop,
        train_loop_config={"lr": 0.1},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="line", callbacks=[Notes()]),
    ).fit()
    print(result.metrics["loss"], result.path.upper())


class Forgets(TrainingOperator):
    """Overrides that cannot work."""

    def setup(self) -> None: ...  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]

    def train_batch(  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
        self, batch: Any
    ) -> float:
        return 0.0


def wrong(trainer: TorchTrainer[Line], by_function: Trainer, keras: TFTrainer) -> None:
    """Lines with a mistake each."""
    TorchTrainer(Line, num_wrokers=2)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    TorchTrainer(Line, num_workers="2")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    TorchTrainer(Line, backend="glo")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    TorchTrainer(Line, epochs=5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    TorchTrainer(Line, config=["lr"])  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    TorchTrainer(Line({}, None))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    TorchTrainer(Net)  # type: ignore[type-var]  # pyright: ignore[reportArgumentType]
    TorchTrainer(num_workers=2)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    TFTrainer(num_replica=2)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    TFTrainer(training_operator_cls=Net)  # type: ignore[type-var]  # pyright: ignore[reportArgumentType]
    Trainer("torch", max_retires=1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    FitTrainer(print, scalling_config=None)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    FitTrainer(print, scaling_config=2)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    trainer.trian()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    trainer.train(epochs=3)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    trainer.train("3")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    print(trainer.train().num_sample)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    trainer.fit("3")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    trainer.fit(max_epochs=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    trainer.fit(3, callbacks=[Checkpointing])  # type: ignore[list-item]  # pyright: ignore[reportArgumentType]
    trainer.fit(3, callbacks=EarlyStopping())  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    trainer.fit(3, callbacks=["early_stopping"])  # type: ignore[list-item]  # pyright: ignore[reportArgumentType]
    trainer.save()  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    trainer.save(3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    trainer.save("a.pt", format="onnx")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    trainer.get_local_operator().modle.eval()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    keras.train(num_step=3)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    by_function.run()  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    raysgd.TorchTrianer(Line)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
