"""`TFTrainer`, with models that count how often each sample was used. Workers import this."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from raysgd.tf import TFTrainer, TrainingOperator
from tests.sequences import deaths
from tests.sequences.books import BATCH_SIZE, NUM_OTHERS, NUM_SAMPLES, NUM_VALIDATED
from tests.sequences.grammar import NUM_WORKERS, Grammar
from tests.sequences.subjects import CALLS, MOMENTS, MOST, ClassTrainer

NUM_ALL = NUM_SAMPLES + NUM_OTHERS


def numbers(first: int, num_samples: int, shuffle: bool = False) -> Any:
    """Return a dataset of batches with the numbers of samples."""
    import tensorflow as tf

    rows = np.arange(first, first + num_samples, dtype="int32")[:, None], np.zeros(num_samples)
    dataset = tf.data.Dataset.from_tensor_slices(rows)
    return (dataset.shuffle(num_samples) if shuffle else dataset).batch(BATCH_SIZE)


def counts() -> Any:
    """Return a model that has a number for each sample, 0 in the beginning."""
    import keras

    keras.config.set_floatx("float64")
    table = keras.layers.Embedding(NUM_ALL, 1, embeddings_initializer="zeros")
    return keras.Sequential([keras.layers.Input([1], dtype="int32"), table, keras.layers.Flatten()])


def negative_mean() -> Any:
    """Return a loss whose gradient, with the batch size as learning rate, adds 1 for each sample."""
    import keras

    class NegativeMean(keras.losses.Loss):
        def call(self, target: Any, output: Any) -> Any:
            return -keras.ops.reshape(output, [-1])

    return NegativeMean()


def optimizer() -> Any:
    """Return the optimizer that adds it."""
    import keras

    return keras.optimizers.SGD(float(BATCH_SIZE))


def make_model(config: dict[str, Any]) -> Any:
    deaths.install(config["folder"])
    model = counts()
    model.compile(optimizer=optimizer(), loss=negative_mean())
    return model


def make_data(config: dict[str, Any]) -> tuple[Any, Any]:
    return numbers(0, NUM_SAMPLES, shuffle=True), numbers(0, NUM_VALIDATED)


class Counting(TrainingOperator):
    """Trains in the library's own loop. Config: `folder` of deaths."""

    def setup(self, config: dict[str, Any]) -> None:
        deaths.install(config["folder"])
        self.model, self.optimizer, self.loss = self.register(
            models=counts(), optimizers=optimizer(), loss=negative_mean()
        )[:3]
        train, validation = make_data(config)
        self.register_data(train_dataset=train, validation_dataset=validation)


class KerasSubject(ClassTrainer):
    """`TFTrainer` with an operator."""

    grammar = Grammar(CALLS, MOST, (), MOMENTS)
    counts_all: ClassVar[bool] = False
    suffix = ".npz"

    def made(self) -> Any:
        return TFTrainer(training_operator_cls=Counting, split_batches=True, **self.options())

    def options(self) -> dict[str, Any]:
        """Return the arguments of a trainer: each third one has a spare worker."""
        return {
            "config": self.config(0),
            "num_workers": NUM_WORKERS,
            "num_cpus_per_worker": 0.5,
            "seed": 1,
            "spare_workers": int(self.number % 3 == 2),
        }

    def config(self, number: int) -> dict[str, Any]:
        return {"folder": str(self.folder / "deaths"), "x": number}

    def begin_again(self) -> None:
        self.trainer.reset_config(self.config(self.num_changes))

    def new_other(self) -> Any:
        return numbers(NUM_SAMPLES, NUM_OTHERS)

    def tables(self) -> Sequence[Sequence[float]]:
        return [np.asarray(self.trainer.get_model().get_weights()[0]).flatten().tolist()]

    def predict(self) -> Sequence[float]:
        found: list[float] = np.asarray(self.trainer.predict(np.arange(NUM_ALL)[:, None])).flatten().tolist()
        return found


class CreatorsSubject(KerasSubject):
    """`TFTrainer` with creators: each call is one `fit` of Keras, which has no number of an epoch or of samples."""

    grammar = Grammar({name: weight for name, weight in CALLS.items() if name not in ("data", "new")}, {}, (), MOMENTS)

    names = ("loss",)

    def made(self) -> Any:
        return TFTrainer(make_model, make_data, **self.options())

    def config(self, number: int) -> dict[str, Any]:
        return {**super().config(number), "fit_config": {"epochs": 1}}

    def new_other(self) -> Any:
        return None


SUBJECTS = {"keras-operator": KerasSubject, "keras-creators": CreatorsSubject}
