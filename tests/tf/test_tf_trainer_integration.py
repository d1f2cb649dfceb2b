"""`TFTrainer` on real workers: results, state, models, losses of workers, and errors in user code.

Covers `raysgd.tf.creator_operator` and `raysgd.tf.objects.registration`: the state of a trainer is what they
registered.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raysgd import testing
from raysgd.exceptions import IncompatibleModelError, RanksDifferError
from raysgd.tf import TFTrainer, TrainingOperator
from raysgd.tf.checkpoints import checkpoint_file
from raysgd.tf.operator.internals import TFSettings
from raysgd.tf.tf_runner import TFRunner
from tests.helpers.sent import sent_by_load
from tests.tf import models
from tests.tf.lab import Experiment, forget_pytorch, largest_difference, run_alone, run_together
from tests.tf.models import Line, make_data, make_model

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def trainer(ray_cluster: None, keras_here: Any) -> Iterator[TFTrainer]:
    config = {"fit_config": {"epochs": 2}, "batch_size": 4, "optimizer": "adam"}
    options: dict[str, Any] = {"num_replicas": 2, "seed": 1, "timeout_s": 240, "initialization_hook": forget_pytorch}
    with TFTrainer(make_model, make_data, config=config, **options) as made:
        yield made


@pytest.mark.keras_in_turns("keras3")
def test_a_file_of_many_workers_sends_each_worker_its_own_random_states_only(
    trainer: TFTrainer, tmp_path: Path
) -> None:
    largest, stored = sent_by_load(trainer, tmp_path / "few.npz", times=2)
    again, stored_again = sent_by_load(trainer, tmp_path / "many.npz", times=100)
    assert abs(again - largest) < 100
    assert stored_again == stored


@pytest.mark.promise("A class for TensorFlow")
def test_two_workers_predict_and_evaluate_other_data_as_one_process_does(trainer: TFTrainer) -> None:
    x, y = models.samples(10, seed=3)
    model = trainer.get_model()
    assert np.abs(trainer.predict(x, batch_size=3) - model.predict(x, verbose=0)).max() < 1e-6
    assert trainer.predict(x[:1]).shape == (1, 1)
    assert trainer.predict(x[:0]).shape == (0, 1)
    expected = model.evaluate(x, y, verbose=0, return_dict=True)["loss"]
    assert trainer.validate(dataset=(x, y))["validation_loss"] == pytest.approx(expected, abs=1e-6)


def changed(state: dict[str, Any], *path: Any, value: Any) -> Any:
    """A copy in which something else is at a place."""
    copy: Any = dict(state) if isinstance(state, dict) else list(state)
    first, *rest = path
    copy[first] = changed(copy[first], *rest, value=value) if rest else value
    return copy


DAMAGES: list[tuple[tuple[Any, ...], Any, str]] = [
    (("epoch",), "one", "`epoch` is a `str`"),
    (("epoch",), -1, "`epoch` is -1"),
    (("resume",), [1], "is a `list`, not a dict"),
    (("resume", "global_step"), "x", "`global_step`"),
    (("resume", "position"), 5, "position in the data"),
    (("resume", "fit"), {"epoch": "x"}, "where `fit` is"),
    (("models",), 3, "'models' is a `int`"),
    (("models", 0), 3, "not a list of arrays"),
    (("models", 0, 0), np.zeros((9, 9)), "Shapes"),
    (("models", 0, 0), np.array([["a"], ["b"]]), "not numbers|Shapes"),
    (("optimizers", 0), [], "0 arrays"),
    (("ranks",), 3, "random states"),
]


@pytest.mark.keras_in_turns("keras3")
def test_a_file_with_anything_else_in_it_changes_nothing(trainer: TFTrainer, tmp_path: Path) -> None:
    trainer.save(tmp_path / "real")
    state = checkpoint_file.read(tmp_path / "real")
    for place, value, message in DAMAGES:
        checkpoint_file.write(tmp_path / "changed", changed(state, *place, value=value))
        with pytest.raises(ValueError, match=message):
            trainer.load(tmp_path / "changed")
    trainer.save(tmp_path / "after")
    assert largest_difference(checkpoint_file.read(tmp_path / "after"), state) == 0


def process_id() -> int:
    return os.getpid()


@pytest.mark.keras_in_turns("keras2")
def test_results_have_the_keys_of_the_old_library_on_workers_without_pytorch(trainer: TFTrainer) -> None:
    trained = trainer.train()
    assert sorted(trained) == ["loss", "mae", "train_loss", "train_mae"]
    first, second = trainer.validate(reduce_results=False)
    assert sorted(first) == ["validation_loss", "validation_mae"]
    assert first == second
    result = trainer.train(profile=True)
    assert result["train_loss"] < trained["train_loss"]
    assert set(result["profile"]) == {"mean_train_epoch_s"}
    assert {"useful", "exchange", "slower_rank"} <= set(result["timings"])
    assert trainer.apply_all_workers(lambda: "torch" in sys.modules) == [False, False]


@pytest.mark.keras_in_turns("keras3")
def test_a_saved_state_is_restored_in_place(trainer: TFTrainer, tmp_path: Path) -> None:
    path = trainer.save(tmp_path / "state.npz")
    saved = trainer.state_dict()
    pids = trainer.apply_all_workers(process_id)
    expected = trainer.train()
    trainer.restore(path)
    assert largest_difference(trainer.state_dict(), saved) == 0
    assert largest_difference(trainer.state_dict(), saved, "optimizers") == 0
    assert trainer.train() == expected
    assert trainer.apply_all_workers(process_id) == pids


@pytest.mark.keras_in_turns("keras2")
def test_of_a_file_of_the_old_library_the_weights_are_loaded_and_the_optimizer_stays(
    trainer: TFTrainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = trainer.state_dict()
    weights = [array + 1 for array in state["models"][0]]
    (tmp_path / "old").write_bytes(pickle.dumps({"epoch": 7, "weights": weights, "optimizer_weights": [np.ones(3)]}))
    trainer.restore(tmp_path / "old")
    after = trainer.state_dict()
    assert after["epoch"] == 7
    assert largest_difference(after, {"models": [weights]}) == 0
    assert largest_difference(after, state, "optimizers") == 0
    assert "the weights and the epoch were loaded, the optimizer is unchanged" in caplog.text


@pytest.mark.keras_in_turns("keras2")
def test_the_model_comes_compiled_with_weights_and_optimizer_which_a_file_of_keras_keeps(
    trainer: TFTrainer, tmp_path: Path
) -> None:
    import tensorflow as tf

    trainer.train()
    model = trainer.get_model()
    weights = trainer.apply_all_operators(lambda operator: operator.model.get_weights())[0]
    assert all(np.array_equal(a, b) for a, b in zip(model.get_weights(), weights, strict=True))
    steps = trainer.apply_all_operators(lambda operator: int(operator.model.optimizer.iterations.numpy()))[0]
    model.save(tmp_path / "model.keras")
    loaded = tf.keras.models.load_model(tmp_path / "model.keras")
    assert int(model.optimizer.iterations.numpy()) == int(loaded.optimizer.iterations.numpy()) == steps > 0
    expected = pytest.approx(trainer.validate()["validation_loss"], rel=1e-5)
    for each in (model, loaded):
        assert each.evaluate(make_data({})[1], verbose=0, return_dict=True)["loss"] == expected


@pytest.mark.keras_in_turns("keras3")
def test_a_save_in_the_background_is_finished_by_the_next_one(trainer: TFTrainer, tmp_path: Path) -> None:
    saved = trainer.state_dict()
    trainer.save(tmp_path / "first.npz", blocking=False)
    trainer.train()
    trainer.save(tmp_path / "second.npz")
    trainer.load(tmp_path / "first.npz")
    assert largest_difference(trainer.state_dict(), saved) == 0
    trainer.save(tmp_path / "missing" / "third.npz", blocking=False)
    with pytest.raises(FileNotFoundError, match="create it first"):
        trainer.save(tmp_path / "fourth.npz")


@pytest.mark.keras_in_turns("keras3")
def test_a_full_disk_leaves_the_file_that_was_there(trainer: TFTrainer, tmp_path: Path) -> None:
    path = trainer.save(tmp_path / "state.npz")
    before = path.read_bytes()
    with testing.fail_save(trainer, after_bytes=100), pytest.raises(OSError, match="No space left"):
        trainer.save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.keras_in_turns("keras3")
def test_only_rank_0_prints_and_writes(trainer: TFTrainer) -> None:
    def found(operator: Any) -> Any:
        import tensorflow as tf

        class Saves(tf.keras.callbacks.ModelCheckpoint):  # type: ignore[misc, name-defined]
            """A class of the user's."""

        given = [tf.keras.callbacks.CSVLogger("unused"), tf.keras.callbacks.EarlyStopping(), Saves("unused.keras")]
        kept = [type(callback).__name__ for callback in operator._callbacks({"callbacks": given})]
        return operator._verbosity({"verbose": 2}), kept

    first, second = trainer.apply_all_operators(found)
    assert first == (2, ["CSVLogger", "EarlyStopping", "Saves"])
    assert second == (0, ["EarlyStopping"])


def make_model_with_callbacks(config: dict[str, Any]) -> Any:
    """Each rank notes what its callbacks are told, and stops when the loss of all ranks says so."""
    import tensorflow as tf

    class Note(tf.keras.callbacks.Callback):  # type: ignore[misc, name-defined]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            noted.append({name: float(value) for name, value in logs.items()})

    model, noted = make_model(config), []  # type: ignore[var-annotated]
    fit = model.fit

    def fit_with_callbacks(*args: Any, callbacks: Any = None, **options: Any) -> Any:
        stop = tf.keras.callbacks.EarlyStopping(monitor="loss", min_delta=100.0, patience=1)
        return fit(*args, callbacks=[*(callbacks or []), Note(), stop], **options)

    object.__setattr__(model, "fit", fit_with_callbacks)
    object.__setattr__(model, "noted", noted)  # past Keras, which makes something of its own of lists
    return model


@pytest.mark.keras_in_turns("keras3")
def test_callbacks_on_all_ranks_are_told_the_metrics_of_all_ranks(trainer: TFTrainer) -> None:
    """In the workers of the trainer, in its group."""

    def told() -> Any:
        from raysgd.engine.shared.types import World
        from raysgd.messages.epochs import EpochRequest
        from raysgd.tf.creator_operator import make_operator
        from raysgd.tf.operator.internals import TFSettings
        from raysgd.tf.tf_runner import TFRunner
        from tests.tf.lab import rank

        config = {"fit_config": {"epochs": 9}, "batch_size": 4}
        operator_cls = make_operator(make_model_with_callbacks, make_data)
        runner = TFRunner(TFSettings(operator_cls, config, 0), World(rank(), 2))
        runner.setup()
        runner.train_epoch(EpochRequest(None, {}, False, 0))
        return runner.operator.model.noted

    first, second = trainer.apply_all_workers(told)
    assert first == second
    assert len(first) == 2  # stopped early, together
    assert set(first[0]) == {"loss", "mae"}


class TwoModels(TrainingOperator):
    """Two models with an optimizer each, stepped in a loop of its own."""

    def setup(self, config: dict[str, Any]) -> None:
        import tensorflow as tf

        made = [tf.keras.Sequential(models.make_layers(config)) for _ in range(2)]
        optimizers = [tf.keras.optimizers.SGD(0.1), tf.keras.optimizers.Adam(0.01)]
        self.registered, self.optimizers = self.register(models=tuple(made), optimizers=optimizers)
        train, _ = make_data(config)
        self.register_data(train_dataset=train, sharding="global")

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        import tensorflow as tf

        x, y = batch
        for model, optimizer in zip(self.registered, self.optimizers, strict=True):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x) - y) ** 2)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return {"loss": float(loss), "num_samples": len(x)}


@pytest.mark.keras_in_turns("keras2")
def test_loops_with_a_tape_of_their_own_keep_equal_models(trainer: TFTrainer) -> None:
    def trained() -> Any:
        from raysgd.engine.shared.types import World
        from tests.tf.lab import Experiment, rank

        calls = (("train", None), ("train", None))
        config = {"batch_size": 4, "num_samples": 20}  # the last batch has samples for both
        together = Experiment(TwoModels, config, calls).run_in(World(rank(), 2))
        alone = Experiment(TwoModels, config, calls).run_in(World(0, 1))
        return together, alone

    (first, alone), (second, _) = trainer.apply_all_workers(trained)
    assert largest_difference(first[1]["state"], second[1]["state"]) == 0
    assert largest_difference(first[1]["state"], alone[1]["state"]) < 1e-5
    assert len(first[1]["state"]["models"]) == 2


class Short(Line):
    """Weights of a kind of number that NumPy does not know, another on each rank."""

    def setup(self, config: dict[str, Any]) -> None:
        import tensorflow as tf

        super().setup(config)
        made = tf.keras.Sequential([tf.keras.Input([4]), tf.keras.layers.Dense(2, dtype="bfloat16")])
        self.model, self.optimizer = self.register(models=made, optimizers=tf.keras.optimizers.SGD(0.1))
        for variable in made.weights:
            variable.assign(tf.fill(variable.shape, tf.cast(self.world_rank + 1, tf.bfloat16)))


@pytest.mark.keras_in_turns("keras3")
def test_all_ranks_begin_with_the_weights_of_the_first_whatever_numbers_they_are(trainer: TFTrainer) -> None:
    def begun() -> Any:
        from raysgd.engine.shared.types import World
        from tests.tf.lab import SEED, rank

        runner = TFRunner(TFSettings(Short, {}, SEED), World(rank(), 2))
        runner.setup()
        weights = [np.array(weight, np.float32).tolist() for weight in runner.operator.model.weights]  # type: ignore[union-attr]
        runner.shutdown()
        return weights

    assert trainer.apply_all_workers(begun) == [[[[1.0, 1.0]] * 4, [1.0, 1.0]]] * 2


class OwnBatches(Line):
    """Rank 0 has two batches, rank 1 has one; a single process has what they have together."""

    def setup(self, config: dict[str, Any]) -> None:
        import tensorflow as tf

        super().setup(config)
        x, y = models.samples(10)
        joint, of_ranks = [[0, 1, 2, 3, 8, 9], [4, 5, 6, 7]], [[[0, 1, 2, 3], [4, 5, 6, 7]], [[8, 9]]]
        batches = joint if self.world_size == 1 else of_ranks[self.world_rank]
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        signature = (tf.TensorSpec([None, models.NUM_FEATURES]), tf.TensorSpec([None, 1]))
        dataset = tf.data.Dataset.from_generator(lambda: ((x[b], y[b]) for b in batches), output_signature=signature)
        self.register_data(train_dataset=dataset.with_options(options))


@pytest.mark.keras_in_turns("keras3")
def test_workers_with_different_numbers_of_batches_are_one_process(trainer: TFTrainer) -> None:
    config, calls = {"optimizer": "adam"}, (("train", None), ("train", None))
    together = run_together(trainer, Experiment(OwnBatches, config, calls))
    alone = run_alone(trainer, Experiment(OwnBatches, config, calls))
    assert largest_difference(together.state[0], together.state[1]) == 0
    for part in ("models", "optimizers"):
        assert largest_difference(alone.state[0], together.state[0], part) < 1e-5
    assert [result["num_samples"] for result in together.results] == [10, 10]


def not_compiled(config: dict[str, Any]) -> Any:
    import tensorflow as tf

    return tf.keras.Sequential(models.make_layers(config))


def with_xla(config: dict[str, Any]) -> Any:
    return make_model({**config, "compile": {"jit_compile": True}})


def stateful(config: dict[str, Any]) -> Any:
    import tensorflow as tf

    layers = [tf.keras.layers.Reshape([2, 2]), tf.keras.layers.LSTM(3, stateful=True), tf.keras.layers.Dense(1)]
    model = tf.keras.Sequential([tf.keras.Input(batch_shape=(4, 4)), *layers])
    model.compile(optimizer="sgd", loss="mse")
    return model


def with_hidden_optimizers(config: dict[str, Any]) -> Any:
    return models.make_model_with_a_step_of_its_own({**config, "hides_optimizers": True})


def one_dataset(config: dict[str, Any]) -> Any:
    return make_data(config)[0]


def three_datasets(config: dict[str, Any]) -> Any:
    return (*make_data(config), None)


def not_a_dataset(config: dict[str, Any]) -> Any:
    return models.samples(8), None


def not_batched(config: dict[str, Any]) -> Any:
    import tensorflow as tf

    return tf.data.Dataset.range(4), None


WRONG: list[tuple[Any, Any, type[Exception], str]] = [
    (not_compiled, make_data, IncompatibleModelError, "`model_creator` returned a model that was not compiled"),
    (with_xla, make_data, IncompatibleModelError, "`jit_compile=True` does not work with several workers"),
    (stateful, make_data, IncompatibleModelError, r"`LSTM\(stateful=True\)` cannot be divided"),
    (with_hidden_optimizers, make_data, IncompatibleModelError, "`Model.train_step` uses no optimizer"),
    (make_model, one_dataset, ValueError, "return two datasets"),
    (make_model, three_datasets, ValueError, "returned 3 things"),
    (make_model, not_a_dataset, TypeError, "is a `tuple`: need a `tf.data.Dataset`"),
    (make_model, not_batched, ValueError, "is not a batch: call `.batch"),
]


def test_creators_that_return_something_wrong_are_told_so(trainer: TFTrainer) -> None:
    """In a worker of the trainer, which has this Keras."""

    def refusals() -> list[Exception]:
        from raysgd.engine.shared.types import World
        from raysgd.tf.creator_operator import make_operator
        from raysgd.tf.operator.internals import TFSettings
        from raysgd.tf.tf_runner import TFRunner
        from tests.tf.lab import rank

        found: list[Exception] = []
        for model_creator, data_creator in creators if rank() == 0 else ():
            try:
                operator_cls = make_operator(model_creator, data_creator)
                TFRunner(TFSettings(operator_cls, {}, 0, num_workers=2), World(0, 1)).setup()
            except Exception as error:
                found.append(error)
        return found

    creators = [row[:2] for row in WRONG]
    for (_, _, error, message), found in zip(WRONG, trainer.apply_all_workers(refusals)[0], strict=True):
        with pytest.raises(error, match=message):
            raise found


def test_an_error_about_what_keras_2_took_says_how_to_have_that(keras_here: Any) -> None:
    def make_old_model(config: dict[str, Any]) -> Any:
        return keras_here.optimizers.Adam(lr=config["lr"])

    with pytest.raises(ValueError, match=r"not recognized|pass a Keras model") as caught:
        TFTrainer(make_old_model, make_data, config={"lr": 0.1}, use_local=True)
    notes = "".join(getattr(caught.value, "__notes__", ()))
    assert ("TF_USE_LEGACY_KERAS=1" in notes) is (keras_here.__name__ == "keras")


@pytest.mark.keras_in_turns("keras3")
@pytest.mark.usefixtures("patient")
def test_xla_is_refused_with_advice(trainer: TFTrainer) -> None:
    def compile_anew(operator: Any) -> None:
        operator.model.compile(optimizer="sgd", loss="mse", jit_compile=True)

    epoch = trainer.state_dict()["epoch"]
    trainer.apply_all_operators(compile_anew)
    with pytest.raises(IncompatibleModelError, match="`jit_compile=True` does not work with several workers"):
        trainer.train(max_retries=0)
    trainer.apply_all_operators(lambda operator: operator.model.compile(optimizer="adam", loss="mse"))
    assert trainer.state_dict()["epoch"] == epoch


def add_rank(operator: Any) -> None:
    weight = operator.model.weights[0]
    weight.assign(weight + float(operator.world_rank))


@pytest.mark.keras_in_turns("keras3")
def test_an_operator_is_trained_saved_and_handed_out(ray_cluster: None, keras_here: Any, tmp_path: Path) -> None:
    config = {"batch_size": 2, "optimizer": "adam"}
    with TFTrainer(training_operator_cls=Line, config=config, num_workers=2, seed=1) as trainer:
        first = trainer.train(num_steps=3, info={"note": 1})
        assert list(first)[:3] == ["num_samples", "epoch", "batch_count"]
        assert first["num_samples"] == 12
        path = trainer.save(tmp_path / "middle.npz")
        rest = trainer.train()
        assert (rest["num_samples"], rest["epoch"]) == (9, 1)
        trainer.load(path)
        again = trainer.train()
        assert again == rest
        trainer.get_model().save(tmp_path / "model.keras")
        state, tested = trainer.state_dict(), trainer.validate()
        trainer.apply_all_operators(add_rank)
        with pytest.raises(RanksDifferError, match=r"kernel.*` of model 1 \(`Sequential`\) on rank 1"):
            trainer.train()
        trainer.load(path)
        assert trainer.train() == rest
    with pytest.raises(RuntimeError, match="This trainer was shut down"):
        trainer.train()
    model = keras_here.models.load_model(tmp_path / "model.keras")
    assert all(np.array_equal(a, b) for a, b in zip(model.get_weights(), state["models"][0], strict=True))
    model.compile(loss="mse", metrics=["mae"])
    found = model.evaluate(make_data({})[1], verbose=0, return_dict=True)
    assert found == pytest.approx({"loss": tested["val_loss"], "mae": tested["val_mae"]}, rel=1e-5)


@pytest.mark.keras_in_turns("keras2")
def test_what_was_changed_by_hand_in_the_driver_is_in_the_next_state(keras_here: Any) -> None:
    with TFTrainer(make_model, make_data, config={"batch_size": 4}, num_replicas=1, use_local=True, seed=1) as alone:
        model = alone.get_local_operator().model
        assert any(np.any(values) for values in alone.state_dict()["models"][0])
        for variable in model.weights:
            variable.assign(0 * variable)
        assert not any(np.any(values) for values in alone.state_dict()["models"][0])
