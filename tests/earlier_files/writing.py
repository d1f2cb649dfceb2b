"""The trainers whose files an earlier version of raysgd wrote, and the script that lets a version write them.

See README.md in this folder. Each case trains, saves, and goes on; what it comes to is what a later version must come
to from the same file. All are small, and in float64 where the framework allows it.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

from raysgd.callbacks import Checkpointing, EarlyStopping
from raysgd.data import Shard, Stream
from raysgd.tf import TFTrainer
from raysgd.tf import TrainingOperator as KerasOperator
from raysgd.torch import TorchTrainer, TrainingOperator

FILES = Path(__file__).parent / "files"
OUTCOMES = "outcomes.json"
Outcome = dict[str, Any]
Trainer = Any


@dataclass(frozen=True)
class Case:
    """What is written, and how it goes on.

    Attributes:
        name: Of the file or folder.
        start: Makes the trainer.
        train_and_save: Trains, and writes to the path.
        go_on: Trains further; returns what that comes to.
        load: Makes a trainer that was just started ready to go on as the one that wrote.
    """

    name: str
    start: Callable[[], Trainer]
    train_and_save: Callable[[Trainer, Path], object]
    go_on: Callable[[Trainer], Outcome]
    load: Callable[[Trainer, Path], object] = lambda trainer, path: trainer.load(path)


# --------------------------------------------------------------------------------------------- what there is to compare


def plain(value: Any) -> Any:
    """Return numbers, texts and containers as JSON has them, which gives floats back to the last bit.

    Left out are seconds, and values of the last batch.
    """
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items() if not re.match(r"last_|(val_)?seconds", key)}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return plain(value.tolist()) if hasattr(value, "tolist") else value


def weights(trainer: Trainer) -> Any:
    """Return the weights and buffers of all models."""
    models = trainer.get_model()
    models = models if isinstance(models, list | tuple) else [models]
    if isinstance(trainer, TorchTrainer):
        return plain([dict(model.state_dict()) for model in models])
    return plain([model.get_weights() for model in models])


def more_calls(trainer: Trainer) -> Outcome:
    """Train to the end of the pass and for another one, and validate."""
    calls = [trainer.train(), trainer.validate(), trainer.train()]
    return {"calls": plain(calls), **at_the_end(trainer)}


def at_the_end(trainer: Trainer) -> Outcome:
    """Return the weights, and how often schedulers have stepped."""
    schedulers = trainer.state_dict().get("schedulers", [])
    return {"weights": weights(trainer), "num_scheduled": [each["last_epoch"] for each in schedulers]}


# --------------------------------------------------------------------------------------------- PyTorch


def samples(num_samples: int, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(num_samples, 3, generator=generator, dtype=torch.float64)
    return TensorDataset(features, features.sin().sum(dim=1, keepdim=True))


def network() -> torch.nn.Sequential:
    layers = torch.nn
    return layers.Sequential(
        layers.Linear(3, 4), layers.BatchNorm1d(4), layers.Tanh(), layers.Dropout(0.25), layers.Linear(4, 1)
    ).double()


class Drawing(TrainingOperator):
    """Its results hold random numbers of all three generators, and its state what operators keep."""

    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(0)
        self.kept: dict[str, Any] = {"num_batches": 0, "best": None, "sizes": (), "mean": np.zeros(2)}
        self.register_parts(config)
        train, validation = self.make_data()
        self.register_data(train_loader=train, validation_loader=validation)

    def register_parts(self, config: dict[str, Any]) -> None:
        raise NotImplementedError

    def make_data(self) -> tuple[Any, Any]:
        return DataLoader(samples(22), batch_size=4, shuffle=True), DataLoader(samples(9, seed=1), batch_size=4)

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.kept["num_batches"] += 1
        self.kept["sizes"] = (*self.kept["sizes"], len(batch[0]))[-3:]
        self.kept["mean"] = self.kept["mean"] + np.asarray(batch[0].mean())
        drawn = {"python": random.random(), "numpy": np.random.random(), "torch": torch.rand(()).item()}
        rates = {f"lr_{number}": rate for number, rate in enumerate(self.rates())}
        return {**self.step_on(batch, batch_info), **drawn, **rates, "kept": self.kept["num_batches"]}

    def step_on(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        return super().train_batch(batch, batch_info)

    def rates(self) -> list[float]:
        return [self.optimizer.param_groups[0]["lr"]]

    def state_dict(self) -> dict[str, Any]:
        return self.kept

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.kept = state_dict


class TwoOptimizers(Drawing):
    """One model; each of its ends has an optimizer, and the first one a schedule."""

    def register_parts(self, config: dict[str, Any]) -> None:
        model = network()
        optimizers = [
            torch.optim.Adam(model[:2].parameters(), lr=0.05),
            torch.optim.SGD(model[-1].parameters(), lr=0.05, momentum=0.5),
        ]
        scheduler = torch.optim.lr_scheduler.StepLR(optimizers[0], step_size=3, gamma=0.5)
        self.model, self.optimizers, self.criterion, self.scheduler = self.register(
            models=model, optimizers=optimizers, criterion=torch.nn.MSELoss(), schedulers=scheduler
        )

    def step_on(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        features, target = batch
        loss = self.criterion(self.model(features), target)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        return {"train_loss": loss.item(), "num_samples": len(target)}

    def rates(self) -> list[float]:
        return [optimizer.param_groups[0]["lr"] for optimizer in self.optimizers]


class TwoModels(Drawing):
    """A generator and a discriminator, each with an optimizer."""

    def register_parts(self, config: dict[str, Any]) -> None:
        models = [torch.nn.Linear(2, 1).double(), network()[:1].append(torch.nn.Linear(4, 1).double())]
        self.models, self.optimizers, self.criterion = self.register(
            models=models,
            optimizers=[torch.optim.Adam(model.parameters(), lr=0.02, betas=(0.5, 0.999)) for model in models],
            criterion=torch.nn.BCEWithLogitsLoss(),
        )
        self.model = torch.nn.ModuleList(self.models)

    def step_on(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        (generator, discriminator), (of_generator, of_discriminator) = self.models, self.optimizers
        features, target = batch
        ones, zeros = torch.ones_like(target), torch.zeros_like(target)
        noise = torch.randn(len(target), 2, dtype=torch.float64)
        fake = torch.cat([features[:, :2], generator(noise)], dim=1)
        loss_d = self.criterion(discriminator(features), ones) + self.criterion(discriminator(fake.detach()), zeros)
        of_discriminator.zero_grad()
        loss_d.backward()
        of_discriminator.step()
        loss_g = self.criterion(discriminator(fake), ones)
        of_generator.zero_grad()
        loss_g.backward()
        of_generator.step()
        return {"loss_d": loss_d.item(), "loss_g": loss_g.item(), "num_samples": len(target)}

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        features, target = batch
        loss = self.criterion(self.models[1](features), torch.ones_like(target))
        return {"val_loss": loss.item(), "num_samples": len(target)}

    def rates(self) -> list[float]:
        return [optimizer.param_groups[0]["lr"] for optimizer in self.optimizers]


class OneModel(Drawing):
    """The stock step, with a scheduler that steps with it."""

    def register_parts(self, config: dict[str, Any]) -> None:
        model = network() if config.get("draws", True) else torch.nn.Sequential(network()[:1], network()[-1])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        self.model, self.optimizer, self.criterion, self.scheduler = self.register(
            models=model,
            optimizers=optimizer,
            criterion=torch.nn.MSELoss(),
            schedulers=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        )


class Rows(Stream):
    """Rows in five shards, of lengths that no one knows before."""

    def shards(self) -> Sequence[Shard]:
        return [Shard(f"shard-{number}") for number in range(5)]

    def open(self, shard: str, start: int) -> Iterator[Any]:
        first = 100 * int(shard.removeprefix("shard-"))
        return iter(range(first + start, first + 11))


def as_sample(number: int, rng: np.random.Generator) -> tuple[Any, Any]:
    features = np.array([number / 100, np.sin(number), rng.normal()])
    return features, features.sum(keepdims=True)


def is_kept(number: int) -> bool:
    return number % 7 != 0


class OnStream(OneModel):
    """Trains on a stream that is filtered, mapped with random numbers, and shuffled."""

    def make_data(self) -> tuple[Any, Any]:
        stream = Rows().filter(is_kept).map(as_sample, seeded=True).shuffle(16).batch(6)
        return stream, stream


def lightning_operator() -> type[Any]:
    """Return the operator of a module with a schedule by steps, hyperparameters, and hooks of checkpoints."""
    from lightning.pytorch import LightningModule

    class Module(LightningModule):
        def __init__(self, config: dict[str, Any]) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.save_hyperparameters({"lr": 0.05})
            self.layers = network()
            self.num_batches = 0

        def loss(self, batch: Any) -> Any:
            features, target = batch
            return torch.nn.functional.mse_loss(self.layers(features), target)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.num_batches += 1
            self.log("seen", float(self.num_batches))
            return self.loss(batch)

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("val_loss", self.loss(batch))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams["lr"])
            scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=20)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["num_batches"] = self.num_batches

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.num_batches = checkpoint["num_batches"]

        def train_dataloader(self) -> Any:
            return DataLoader(samples(22), batch_size=4, shuffle=True)

        def val_dataloader(self) -> Any:
            return DataLoader(samples(9, seed=1), batch_size=4)

    return TrainingOperator.from_ptl(Module)


OPTIONS: dict[str, Any] = {"use_gpu": False, "seed": 3}


def local(operator_cls: type[Any], every: str | None = "epoch", **options: Any) -> Trainer:
    options = {**OPTIONS, "scheduler_step_freq": every, **options}
    return TorchTrainer(training_operator_cls=operator_cls, use_local=True, **options)


def on_two(every: str = "epoch", **options: Any) -> Trainer:
    group: dict[str, Any] = {"num_workers": 2, "num_cpus_per_worker": 0.5, "scheduler_step_freq": every}
    return TorchTrainer(training_operator_cls=OneModel, **OPTIONS, **group, **options)


def divided() -> Trainer:
    """A trainer that divides the model, layer by layer."""
    return on_two(config={"draws": False}, strategy="fsdp", strategy_options={"min_block_parameters": 1})


def two_epochs(trainer: Trainer, path: Path) -> None:
    trainer.train()
    trainer.train()
    trainer.save(path)


def inside_a_pass(trainer: Trainer, path: Path) -> None:
    trainer.train()
    trainer.train(num_steps=2)
    trainer.save(path)


# --------------------------------------------------------------------------------------------- runs of `fit`


def run_callbacks(folder: Path) -> list[Any]:
    return [Checkpointing(folder, metric="val_loss"), EarlyStopping("val_loss", patience=3)]


def fit(trainer: Trainer, folder: Path) -> None:
    trainer.fit(2, callbacks=run_callbacks(folder))


def two_more_epochs(trainer: Trainer) -> Outcome:
    return of_run(trainer, trainer.fit(2))


def of_run(trainer: Trainer, rows: Sequence[Any]) -> Outcome:
    """Return what two epochs have come to."""
    return {"rows": plain(list(rows[-2:])), **at_the_end(trainer)}


def load_newest(trainer: Trainer, folder: Path) -> None:
    trainer.load(folder / "epoch_0002.ckpt")


# --------------------------------------------------------------------------------------------- Keras


def keras_layers() -> Any:
    import tensorflow as tf

    layers = tf.keras.layers
    tf.keras.utils.set_random_seed(7)
    return [
        layers.Input([3]),
        layers.Dense(4, activation="tanh"),
        layers.BatchNormalization(),
        layers.Dense(1),
    ]


def keras_data(config: dict[str, Any]) -> tuple[Any, Any]:
    import tensorflow as tf

    arrays = [
        [tensor.float().numpy() for tensor in samples(number, seed).tensors] for number, seed in ((22, 0), (9, 1))
    ]
    train, test = (tf.data.Dataset.from_tensor_slices(tuple(each)) for each in arrays)
    return train.batch(4), test.batch(4)


def keras_model(config: dict[str, Any]) -> Any:
    import tensorflow as tf

    model = tf.keras.Sequential(keras_layers())
    model.compile(optimizer=tf.keras.optimizers.Adam(0.05), loss="mse", metrics=["mae"])
    return model


class KerasModel(KerasOperator):
    """The stock step of Keras."""

    def setup(self, config: dict[str, Any]) -> None:
        import tensorflow as tf

        self.model, self.optimizer, self.loss, _ = self.register(
            models=tf.keras.Sequential(keras_layers()),
            optimizers=tf.keras.optimizers.Adam(0.05),
            loss=tf.keras.losses.MeanSquaredError(),
            metrics=[tf.keras.metrics.MeanAbsoluteError(name="mae")],
        )
        train, test = keras_data(config)
        self.register_data(train_dataset=train, validation_dataset=test)


def with_creators() -> Trainer:
    return TFTrainer(keras_model, keras_data, {}, use_local=True, seed=3)


def with_keras_operator() -> Trainer:
    return TFTrainer(training_operator_cls=KerasModel, use_local=True, seed=3)


# --------------------------------------------------------------------------------------------- all of them

LOCAL = [
    Case("two_optimizers_after_two_epochs.pt", lambda: local(TwoOptimizers), two_epochs, more_calls),
    Case("two_optimizers_inside_a_pass.pt", lambda: local(TwoOptimizers), inside_a_pass, more_calls),
    Case("two_models_inside_a_pass.pt", lambda: local(TwoModels, None), inside_a_pass, more_calls),
    Case("stream_inside_a_pass.pt", lambda: local(OnStream, "batch", split_batches=True), inside_a_pass, more_calls),
    Case("lightning_inside_a_pass.pt", lambda: local(lightning_operator(), None), inside_a_pass, more_calls),
    Case("fit", lambda: local(OneModel), fit, two_more_epochs, load_newest),
]
ON_TWO = [
    Case("two_workers_inside_a_pass.pt", lambda: on_two("batch"), inside_a_pass, more_calls),
    Case("fit_of_a_divided_model", divided, fit, two_more_epochs, load_newest),
]
KERAS = {"keras3": "keras", "keras2": "tf_keras"}
WITH_KERAS = {
    keras: [
        Case(f"creators_{keras}.npz", with_creators, two_epochs, more_calls),
        Case(f"operator_{keras}.npz", with_keras_operator, two_epochs, more_calls),
    ]
    for keras in KERAS
}
"""For each `tf.keras` that there may be."""


def use_keras(keras: str) -> None:
    """Let it be `tf.keras`, also in workers."""
    os.environ["TF_USE_LEGACY_KERAS"] = "1" if keras == "keras2" else "0"
    import tensorflow as tf

    tf.keras = importlib.import_module(KERAS[keras])


def plain_training(framework: str) -> Any:
    """Return the weights after two epochs without raysgd: where they are as they were, so are the last bits of a case.

    Args:
        framework: "torch", or the Keras that is `tf.keras`.
    """
    if framework != "torch":
        model, (train, _) = keras_model({}), keras_data({})
        model.fit(train, epochs=2, shuffle=False, verbose=0)
        return plain(model.get_weights())
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in range(2):
        for features, target in DataLoader(samples(22), batch_size=4, shuffle=True):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(features), target).backward()
            optimizer.step()
    return plain(dict(model.state_dict()))


def write(case: Case, folder: Path) -> dict[str, Any]:
    """Let a case write into a folder; return what it saved and how it went on."""
    with case.start() as trainer, tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, case.name)
        case.train_and_save(trainer, path)
        saved = weights(trainer)
        outcome = {"saved": saved, "went_on": case.go_on(trainer)}
        shutil.move(path, folder / case.name)
        return outcome


def main(folder: Path) -> None:
    """Write all cases into a new folder."""
    folder.mkdir(parents=True)
    outcomes: dict[str, Any] = {"torch": plain_training("torch")}
    for case in LOCAL:
        outcomes[case.name] = write(case, folder)
    import ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    for case in ON_TWO:
        outcomes[case.name] = write(case, folder)
    ray.shutdown()
    for keras in KERAS:
        use_keras(keras)
        outcomes[keras] = plain_training(keras)
        for case in WITH_KERAS[keras]:
            outcomes[case.name] = write(case, folder)
    lines = (f"{json.dumps(name)}: {json.dumps(outcome)}" for name, outcome in outcomes.items())
    (folder / OUTCOMES).write_text("{\n" + ",\n".join(lines) + "\n}\n")  # a line for each


if __name__ == "__main__":
    main(Path(sys.argv[1]))
