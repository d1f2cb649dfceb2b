"""`TFTrainer` on real workers: results, state, models, losses of workers, and errors in user code.

Covers `raysgd.tf.creator_operator` and `raysgd.tf.objects.registration`: the state of a trainer is what they
registered.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raysgd import testing
from raysgd.callbacks import GradientNorms
from raysgd.core.engine.shared.types import World
from raysgd.core.numbers.results import validation_name
from raysgd.exceptions import IncompatibleModelError, RanksDifferError
from raysgd.tf import TFTrainable, TFTrainer, TrainingOperator
from raysgd.tf.checkpoints import checkpoint_file
from raysgd.tf.creator_operator import make_operator
from raysgd.tf.tf_runner import TFRunner
from raysgd.tf.training_operator import TFSettings
from raysgd.trainer.configuration import Recovery
from tests.helpers.sent import sent_by_load
from tests.tf import models
from tests.tf.lab import Experiment, forget_pytorch, largest_difference, rank, run_alone, run_together
from tests.tf.models import Line, make_data, make_model
from tests.tf.models import make_model_with_a_step_of_its_own as make_own_step

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
    (("resume", "fit"), {"epoch": "x"}, "the position of `fit`"),
    (("models",), 3, "'models' is a `int`"),
    (("models", 0), 3, "not a list of arrays"),
    (("models", 0), [np.zeros((4, 8))], "variables"),
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


@pytest.mark.keras_in_turns("keras2")
def test_a_callback_for_pytorch_or_for_one_worker_is_refused_before_anything_begins(trainer: TFTrainer) -> None:
    before = len(trainer.history)
    with pytest.raises(TypeError, match=r"`GradientNorms` runs in the workers, .*`TFTrainer` cannot do: leave it out"):
        trainer.fit(1, callbacks=[GradientNorms()])
    for options in ({"max_steps": 5}, {"epochs": 1, "validate_every_n_steps": 5}):
        with pytest.raises(
            ValueError, match=f"`{[*options][-1]}` cannot work here: `TFTrainer` cannot hold its workers"
        ):
            trainer.fit(**options)
    with pytest.raises(ValueError, match="`num_workers=2` cannot work: it would restore weights and epoch on rank 0"):
        trainer.reset_config({"fit_config": {"callbacks": [type("BackupAndRestore", (), {"set_model": None})()]}})
    assert len(trainer.history) == before
    assert trainer.fit(1, callbacks=[])[0]["val_loss"] >= 0


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
    trainer.save(tmp_path / "first.npz" / "third.npz", blocking=False)
    with pytest.raises(FileExistsError, match=r"first\.npz"):
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
    config = {"batch_size": 4, "num_samples": 20}  # the last batch has samples for both
    experiment = Experiment(TwoModels, config, (("train", None), ("train", None)))
    [alone], (first, second) = run_alone(trainer, experiment).state, run_together(trainer, experiment).state
    assert largest_difference(first, second) == 0
    assert largest_difference(first, alone) < 1e-5
    assert len(first["models"]) == 2


class KnownBatches(Line):
    """Batches whose size TensorFlow knows."""

    def setup(self, config: dict[str, Any]) -> None:
        import tensorflow as tf

        super().setup(config)
        data = tf.data.Dataset.from_tensor_slices(models.samples(16)).batch(4, drop_remainder=True)
        self.register_data(train_dataset=data)


@pytest.mark.keras_in_turns("keras3")
def test_whole_batches_are_told(ray_cluster: None, keras_here: Any, caplog: pytest.LogCaptureFixture) -> None:
    with TFTrainer(training_operator_cls=KnownBatches, config={}, num_workers=2) as trainer:
        trainer.train()
    assert caplog.text.count("each of 2 workers takes whole batches of 4, 8 in all; `split_batches=True` divides") == 1


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
    begun = run_together(trainer, Experiment(Short, calls=())).state
    weights = [[np.array(weight, np.float32).tolist() for weight in state["models"][0]] for state in begun]
    assert weights == [[[[1.0, 1.0]] * 4, [1.0, 1.0]]] * 2


def not_compiled(config: dict[str, Any]) -> Any:
    import tensorflow as tf

    return tf.keras.Sequential(models.make_layers(config))


def stateful(config: dict[str, Any]) -> Any:
    import tensorflow as tf

    layers = [tf.keras.layers.Reshape([2, 2]), tf.keras.layers.LSTM(3, stateful=True), tf.keras.layers.Dense(1)]
    model = tf.keras.Sequential([tf.keras.Input(batch_shape=(4, 4)), *layers])
    model.compile(optimizer="sgd", loss="mse")
    return model


def not_batched(config: dict[str, Any]) -> Any:
    import tensorflow as tf

    return tf.data.Dataset.range(4), None


XLA, HIDDEN = {"compile": {"jit_compile": True}}, {"hides_optimizers": True}
WRONG: list[tuple[Any, Any, type[Exception], str]] = [
    (not_compiled, make_data, IncompatibleModelError, "`model_creator` returned a model that was not compiled"),
    (lambda _: make_model(XLA), make_data, IncompatibleModelError, "`jit_compile=True` does not work with several"),
    (stateful, make_data, IncompatibleModelError, r"`LSTM\(stateful=True\)` cannot be divided"),
    (lambda _: make_own_step(HIDDEN), make_data, IncompatibleModelError, "`Model.train_step` uses no optimizer"),
    (make_model, lambda config: make_data(config)[0], ValueError, "return two datasets"),
    (make_model, lambda config: (*make_data(config), None), ValueError, "returned 3 objects"),
    (make_model, lambda _: (models.samples(8), None), TypeError, "is a `tuple`: need a `tf.data.Dataset`"),
    (make_model, not_batched, ValueError, "is not a batch: call `.batch"),
]


def test_creators_that_return_something_wrong_are_told_so(trainer: TFTrainer) -> None:
    """In a worker of the trainer, which has this Keras."""

    def refusals() -> list[Exception]:
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


def add_rank(operator: Any) -> None:
    weight = operator.model.weights[0]
    weight.assign(weight + float(operator.world_rank))


@pytest.mark.keras_in_turns("keras3")
def test_an_operator_is_trained_saved_and_handed_out(ray_cluster: None, keras_here: Any, tmp_path: Path) -> None:
    config = {"batch_size": 2, "optimizer": "adam"}
    recovery = Recovery(snapshot_every_s=0)  # weights are compared at each snapshot, otherwise only now and then
    with TFTrainer(training_operator_cls=Line, config=config, num_workers=2, seed=1, recovery=recovery) as trainer:
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


@pytest.mark.keras_in_turns("keras2", "keras3")
@pytest.mark.parametrize(
    "what",
    [{"training_operator_cls": Line}, {"model_creator": make_model, "data_creator": make_data}],
    ids=["operator", "creators"],
)
def test_a_spare_of_a_single_worker_validates_the_weights_of_the_last_call_and_takes_its_place(
    what: dict[str, Any], ray_cluster: None, keras_here: Any
) -> None:
    options: dict[str, Any] = {"num_workers": 1, "seed": 1, "timeout_s": 240, "initialization_hook": forget_pytorch}
    with TFTrainer(**what, config={"batch_size": 4}, spare_workers=1, **options) as trainer:
        trainer.train()
        inline = trainer.validate()
        handle = trainer.validate(blocking=False)
        trainer.train()
        beside = handle.result(300)
        assert beside == pytest.approx(inline, rel=1e-6, nan_ok=True)
        assert trainer.validate() != pytest.approx(inline, rel=1e-6, nan_ok=True)
        history = trainer.fit(2, validate="async")
        last = {validation_name(name): value for name, value in trainer.validate().items()}
        assert {name: history[-1][name] for name in last} == pytest.approx(last, rel=1e-6, nan_ok=True)
        assert history[-1]["val_seconds"] > 0

        [spare] = trainer._life.controller.group.standby._idle  # type: ignore[union-attr]
        testing.kill_worker(trainer, 0)
        trainer.train()
        assert trainer.apply_all_workers(os.getpid) == [spare.info.pid]


# ------------------------------------------------------------------------------------------------ trials

CONFIG = {
    "model_creator": make_model,
    "data_creator": make_data,
    "num_replicas": 1,
    "use_gpu": False,
    "trainer_config": {"batch_size": 4},
}


def make_smaller_model(config: dict[str, Any]) -> Any:
    import tensorflow as tf

    model = tf.keras.Sequential([tf.keras.layers.Input([models.NUM_FEATURES]), tf.keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse")
    return model


def test_a_trial_asks_for_its_workers() -> None:
    request = TFTrainable.default_resource_request({**CONFIG, "num_replicas": 2, "num_cpus_per_worker": 3})
    assert [bundle["CPU"] for bundle in request.bundles] == [3, 3]


def test_it_is_found_where_the_old_library_had_it() -> None:
    from raysgd.tf import tf_trainer

    assert tf_trainer.TFTrainable is TFTrainable
    with pytest.raises(AttributeError, match="no attribute `TFTrainables`"):
        _ = tf_trainer.TFTrainables


@pytest.mark.keras_in_turns("keras3")
def test_a_trial_trains_saves_restores_and_serves_another_config(ray_cluster: None, keras: str, tmp_path: Path) -> None:
    trial = TFTrainable(dict(CONFIG))
    try:
        first = trial.step()
        assert sorted(first) == ["loss", "mae", "train_loss", "train_mae", "validation_loss", "validation_mae"]
        trial.save_checkpoint(str(tmp_path))
        second = trial.step()
        trial.load_checkpoint(str(tmp_path))
        assert trial.step() == pytest.approx(second)
        processes = trial.trainer.apply_all_workers(os.getpid)
        assert trial.reset_config({**CONFIG, "model_creator": make_smaller_model})
        assert len(trial.trainer.get_model().layers) == 1
        assert trial.reset_config(dict(CONFIG))
        assert trial.step() == pytest.approx(first), "it begins again, with the first creators"
        assert trial.trainer.apply_all_workers(os.getpid) == processes
    finally:
        trial.cleanup()
