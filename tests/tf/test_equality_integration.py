"""N replicas are one process on the joined batch: weights, optimizer and metrics, for both Keras.

Covers `raysgd.tf.tf_runner`, `raysgd.tf.hosting.tf_hosted`, `raysgd.tf.training_operator`,
`raysgd.tf.parallel.keras_sync` and `raysgd.tf.parallel.step`: only connected replicas show that they stay equal.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest

from raysgd.core.engine.shared.types import StateHandover, World
from raysgd.exceptions import InvalidRegistrationError
from raysgd.tf import TFTrainer, TrainingOperator
from raysgd.tf.creator_operator import make_operator
from raysgd.tf.objects.datasets import packed
from raysgd.tf.tf_runner import TFRunner
from raysgd.tf.training_operator import OperatorContext, TFSettings
from raysgd.trainer.configuration import BatchOptions
from raysgd.trainer.messages.epochs import EpochRequest
from raysgd.utils import BATCH_SIZE
from tests.tf.lab import SEED, Experiment, Findings, largest_difference, rank, refusals, run_alone, run_together
from tests.tf.loss_models import (
    Tokens,
    make_data_of_losses,
    make_masked_data,
    make_masked_model,
    make_model_of_losses,
    make_model_that_reports,
)
from tests.tf.models import (
    NUM_FEATURES,
    Line,
    TrainsMore,
    Unfreezes,
    make_data,
    make_model,
    make_model_with_a_step_of_its_own,
    samples,
)

pytestmark = pytest.mark.integration

CALLS = (("train", None), ("train", None), ("validate", None))

# 21 samples in batches of 4: the last step has one sample for two workers. 13 to test on: the last batch likewise.
OF_FIT: dict[str, dict[str, Any]] = {
    "regularized": {
        "layers": "regularized",
        "unbuilt": True,
        "options": {"momentum": 0.9, "clipnorm": 0.1},
        "num_test_samples": 1,
    },
    "embedding": {"layers": "embedding", "optimizer": "adam", "lr": 0.05},
    "sequences": {"layers": "sequences", "fit_config": {"steps_per_epoch": 3}, "evaluate_config": {"steps": 2}},
    "shuffled": {"fit_config": {"epochs": 3}, "shuffles": True, "compile": {"run_eagerly": True}},
    "steps_per_execution": {"compile": {"steps_per_execution": 2}, "num_samples": 20},
}


def both(lab: TFTrainer, operator_cls: type[TrainingOperator], config: dict[str, Any]) -> tuple[Findings, Findings]:
    experiment = Experiment(operator_cls, {"batch_size": 4, "sharding": "global", **config}, CALLS)
    return run_alone(lab, experiment), run_together(lab, experiment)


def assert_same(alone: Findings, together: Findings) -> None:
    assert largest_difference(alone.state[0], together.state[0]) < 1e-5
    assert largest_difference(together.state[0], together.state[1]) == 0
    assert largest_difference(alone.state[0], together.state[0], "optimizers") < 1e-5
    for one, many in zip(alone.results, together.results, strict=True):
        kept = [name for name in one if not name.startswith("last_") and name not in ("batch_count", "epoch")]
        expected = pytest.approx({name: one[name] for name in kept}, rel=1e-5, abs=1e-7, nan_ok=True)
        assert {name: many[name] for name in kept} == expected


@pytest.mark.keras_in_turns("keras3")
def test_a_constant_global_batch_has_the_steps_of_one_process(lab: TFTrainer) -> None:
    options = {"batch_options": BatchOptions(True)}
    config = {BATCH_SIZE: 5, "batch_size": 5}  # does not divide by two, and is that of both workers
    together = run_together(lab, Experiment(Line, config, CALLS, options))
    alone = run_alone(lab, Experiment(Line, config, CALLS))
    assert_same(alone, together)


def soaked(*names: str) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.soak) for name in names]


@pytest.mark.keras_in_turns("keras3", "keras2")
@pytest.mark.parametrize("case", OF_FIT)
def test_fit_on_two_workers_is_fit_in_one_process(lab: TFTrainer, case: str) -> None:
    assert_same(*both(lab, make_operator(make_model, make_data), OF_FIT[case]))


# An operator makes nothing else of a case of `fit`, which averages with the same code.
@pytest.mark.keras_in_turns("keras2")
def test_an_operator_on_two_workers_is_one_in_one_process(lab: TFTrainer) -> None:
    assert_same(*both(lab, Line, {"options": {"global_clipnorm": 0.1}, "num_test_samples": 1}))


LOSSES = {
    "sum_and_weights": (make_model_of_losses, make_data_of_losses, {}),
    "sum_and_weights_eagerly": (make_model_of_losses, make_data_of_losses, {"run_eagerly": True}),
    "masked": (make_masked_model, make_masked_data, {}),
    "masked_and_ignored": (make_masked_model, make_masked_data, {"ignore_class": 2}),
    "own_step": (make_model_that_reports, make_data, {"fit_config": {"epochs": 2}}),
}


@pytest.mark.keras_in_turns("keras3", "keras2")
@pytest.mark.parametrize(
    "case", ["sum_and_weights", "own_step", *soaked("sum_and_weights_eagerly", "masked", "masked_and_ignored")]
)
def test_a_loss_that_is_no_mean_over_samples_is_that_of_one_process(lab: TFTrainer, case: str) -> None:
    model_creator, data_creator, config = LOSSES[case]
    alone, together = both(lab, make_operator(model_creator, data_creator), config)
    assert_same(alone, together)
    assert all(first == second for first, second in together.single), "what callbacks see, such as early stopping"


@pytest.mark.keras_in_turns("keras3")
@pytest.mark.parametrize("kind", ["arrays", *soaked("dataset")])
def test_fit_validates_over_all_workers_what_it_is_given(lab: TFTrainer, kind: str) -> None:
    import tensorflow as tf

    x, y = samples(13, seed=1)
    given = (x, y) if kind == "arrays" else packed("it", tf.data.Dataset.from_tensor_slices((x, y)).batch(4))
    options = {"validation_data": given, "validation_steps": 3}
    config = {"counts": True, "fit_config": options | ({"validation_batch_size": 4} if kind == "arrays" else {})}
    alone, together = both(lab, make_operator(make_model, make_data), config)
    assert_same(alone, together)
    assert alone.results[0]["train_val_hits"] > 1


@pytest.mark.keras_in_turns("keras3", "keras2")
def test_an_operator_may_say_how_much_a_batch_counts(lab: TFTrainer) -> None:
    assert_same(*both(lab, Tokens, {}))
    for error in refusals(lab, Experiment(Tokens, {"batch_size": 4, "sign": -1})):
        with pytest.raises(ValueError, match="need a number from 0 on, by which the batch counts"):
            raise error


@pytest.mark.keras_in_turns("keras3")
def test_layers_that_are_trained_later_are_those_of_one_process(lab: TFTrainer) -> None:
    alone, together = both(lab, Unfreezes, {"registers": True})
    assert_same(alone, together)
    first = lab.apply_all_workers(
        lambda: Line({"batch_size": 4}, OperatorContext(TFSettings(Line, {}, SEED), World(0, 1))).model.get_weights()
    )[0]
    assert np.abs(together.state[0]["models"][0][0] - first[0]).max() > 0.01


@pytest.mark.keras_in_turns("keras3", "keras2")
@pytest.mark.parametrize(
    ("operator_cls", "message"),
    [
        (Unfreezes, "`self.optimizer` is a `SGD` that was not registered"),
        (TrainsMore, r"trains variables of no registered"),
    ],
)
def test_what_would_come_apart_is_refused(lab: TFTrainer, operator_cls: type[TrainingOperator], message: str) -> None:
    config = {"batch_size": 4, "registers": False}
    for error in refusals(lab, Experiment(operator_cls, config, CALLS[:2])):
        with pytest.raises(InvalidRegistrationError, match=message):
            raise error


@pytest.mark.keras_in_turns("keras3", "keras2")
def test_optimizers_of_a_train_step_of_its_own_of_which_one_clips_are_those_of_one_process(lab: TFTrainer) -> None:
    """And a new replica takes over what all of them keep."""
    operator_cls = make_operator(make_model_with_a_step_of_its_own, make_data)

    def restored(state: Any) -> Any:
        runner = TFRunner(TFSettings(operator_cls, {"batch_size": 4}, SEED, num_workers=2), World(0, 1))
        runner.setup()
        runner.restore(state, None)
        return runner.state()

    experiment = Experiment(operator_cls, {"batch_size": 4}, (("train", None), ("train", None)))
    alone, together = run_alone(lab, experiment), run_together(lab, experiment)
    for part in ("models", "optimizers"):
        assert largest_difference(together.state[0], together.state[1], part) == 0
        assert largest_difference(alone.state[0], together.state[0], part) < 1e-5
    assert len(together.state[0]["optimizers"]) == 3  # with the one of `compile`, which is not used
    new = lab.apply_all_workers(lambda: restored(together.state[0]))[0]
    assert largest_difference(new, together.state[0], "optimizers") == 0


class Seeing(Line):
    """Notes what its own code is given."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.seen: list[tuple[int, int, int]] = []

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.seen.append((len(batch[0]), batch_info["batch_idx"], batch_info["global_step"]))
        return super().train_batch(batch, batch_info)


@pytest.mark.keras_in_turns("keras2", "keras3")
def test_a_worker_without_samples_takes_part_in_a_step_that_its_own_code_does_not_see(lab: TFTrainer) -> None:
    alone, together = both(lab, Seeing, {"num_samples": 5})
    assert_same(alone, together)
    assert together.seen == [[(2, 0, 0), (1, 1, 1), (2, 0, 2), (1, 1, 3)], [(2, 0, 0), (2, 0, 2)]]


@pytest.mark.soak
@pytest.mark.keras_in_turns("keras3", "keras2")
def test_and_in_the_first_step_of_its_process(lab: TFTrainer) -> None:
    assert_same(*both(lab, Line, {"num_samples": 1, "layers": "embedding"}))


@pytest.mark.keras_in_turns("keras3")
def test_batches_of_one_worker_make_a_global_batch(lab: TFTrainer) -> None:
    alone = run_alone(lab, Experiment(Line, {"batch_size": 4}, CALLS))
    together = run_together(lab, Experiment(Line, {"batch_size": 2}, CALLS))
    assert_same(alone, together)
    assert together.results[0]["num_samples"] == 21


class Noticing(make_operator(make_model, make_data)):  # type: ignore[misc]
    """Notes what callbacks see at the end of an epoch: the weights and the metrics."""

    def setup(self, config: dict[str, Any]) -> None:
        import tensorflow as tf

        class Notes(tf.keras.callbacks.Callback):  # type: ignore[misc, name-defined]
            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                seen.append((self.model.get_weights(), {name: float(value) for name, value in logs.items()}))

        super().setup(config)
        seen = self.seen = []
        config["fit_config"] = {"callbacks": [Notes()], "validation_data": self.validation_dataset}


@pytest.mark.keras_in_turns("keras2", "keras3")
def test_callbacks_see_the_metrics_of_all_ranks_and_the_mean_of_the_statistics_of_batch_norm(lab: TFTrainer) -> None:
    config = {"layers": "batch_norm", "num_samples": 16, "batch_size": 4}
    found = run_together(lab, Experiment(Noticing, config, (("train", None), ("validate", None))))
    assert largest_difference(found.state[0], found.state[1]) == 0
    (weights, logs), (_, logs_of_other) = (seen[0] for seen in found.seen)
    assert logs == logs_of_other
    assert set(logs) == {"loss", "mae", "val_loss", "val_mae"}
    assert largest_difference({"models": [weights]}, found.state[1]) == 0
    assert np.abs(weights[4]).max() > 0, "the moving mean"
    assert logs["val_loss"] == pytest.approx(found.results[1]["validation_loss"])


class Stopping(make_operator(make_model, make_data)):  # type: ignore[misc]
    """One rank is told to stop: in its second step, or after the last one of the epoch."""

    def setup(self, config: dict[str, Any]) -> None:
        import tensorflow as tf

        class Stop(tf.keras.callbacks.Callback):  # type: ignore[misc, name-defined]
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                seen.append(batch)
                self.model.stop_training = rank() == 1 and batch == config["batch"]

        super().setup(config)
        seen = self.seen = []
        config["fit_config"] = {"callbacks": [Stop(), tf.keras.callbacks.TerminateOnNaN()], "epochs": 2}


@pytest.mark.keras_in_turns("keras3", "keras2")
@pytest.mark.parametrize("batch", [1, pytest.param(5, marks=pytest.mark.soak)])
def test_a_callback_that_stops_one_rank_stops_all_at_the_same_step(lab: TFTrainer, batch: int) -> None:
    found = run_together(lab, Experiment(Stopping, {"batch_size": 4, "batch": batch}))
    assert found.seen == [list(range(batch + 1))] * 2
    assert largest_difference(found.state[0], found.state[1]) == 0


@pytest.mark.keras_in_turns("keras3")
def test_ranks_skip_a_step_together_when_half_precision_overflows(lab: TFTrainer) -> None:
    config = {"policy": "mixed_float16", "num_samples": 16}
    found = run_together(lab, Experiment(make_operator(make_model, make_data), config, CALLS))
    for part in ("models", "optimizers"):
        assert largest_difference(found.state[0], found.state[1], part) == 0
    assert np.isfinite(found.results[-1]["validation_loss"])


@pytest.mark.keras_in_turns("keras2")
def test_a_constant_global_batch_of_data_that_are_not_divided_is_refused(lab: TFTrainer) -> None:
    for error in refusals(lab, Experiment(OwnBatches, {}, options={"batch_options": BatchOptions(True)})):
        with pytest.raises(ValueError, match=r"`split_batches=True` cannot work: .*register a dataset that the lib"):
            raise error


OF_RANKS = [[[0, 1, 2, 3], [4, 5, 6, 7]], [[8, 9]]]
TOGETHER = [[0, 1, 2, 3, 8, 9], [4, 5, 6, 7]]


def own_dataset(batches: list[list[int]]) -> Any:
    """These samples, which are not divided."""
    import tensorflow as tf

    x, y = samples(10)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    signature = (tf.TensorSpec([None, NUM_FEATURES]), tf.TensorSpec([None, 1]))
    dataset = tf.data.Dataset.from_generator(lambda: ((x[b], y[b]) for b in batches), output_signature=signature)
    return dataset.with_options(options)


class OwnBatches(Line):
    """Rank 0 has two batches, rank 1 has one; a single process has what they have together."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        dataset = own_dataset(TOGETHER if self.world_size == 1 else OF_RANKS[self.world_rank])
        self.register_data(train_dataset=dataset, validation_dataset=self.validation_dataset)


@pytest.mark.keras_in_turns("keras3")
def test_workers_with_different_numbers_of_batches_are_one_process(lab: TFTrainer) -> None:
    alone, together = both(lab, OwnBatches, {"optimizer": "adam"})
    assert_same(alone, together)
    assert [result["num_samples"] for result in together.results[:2]] == [10, 10]


FitOwnBatches = make_operator(make_model, lambda config: (own_dataset(OF_RANKS[rank()]), make_data(config)[1]))


@pytest.mark.keras_in_turns("keras3", "keras2")
@pytest.mark.parametrize("fit_config", [{"steps_per_epoch": 3, "epochs": 3}, pytest.param({}, marks=pytest.mark.soak)])
def test_fit_of_workers_with_different_numbers_of_batches_ends_together(
    lab: TFTrainer, fit_config: dict[str, Any]
) -> None:
    found = run_together(lab, Experiment(FitOwnBatches, {"fit_config": fit_config}, CALLS))
    assert largest_difference(found.state[0], found.state[1]) == 0


def shuffled(config: dict[str, Any]) -> Any:
    import tensorflow as tf

    return tf.data.Dataset.range(12).shuffle(12).batch(config["batch_size"])


class Noting(Line):
    """Notes the samples that it is given, in an order that differs from pass to pass."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.register_data(train_dataset=shuffled(config))
        self.seen: list[list[int]] = []

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.seen.append(batch.numpy().tolist())
        return {"num_samples": len(batch)}


@pytest.mark.keras_in_turns("keras2")
def test_a_pass_goes_on_elsewhere_in_the_same_order(lab: TFTrainer) -> None:
    """Two passes and a half on two workers; the rest in a new process's place, on one."""

    def interrupted() -> Any:
        runner = new_runner(World(rank(), 2))
        for _ in range(2):
            runner.train_epoch(request(None))
        runner.train_epoch(request(1))
        state, seen = runner.state(), list(runner.operator.seen)
        runner.train_epoch(request(None))
        return state, seen, runner.operator.seen[len(seen) :]

    def resumed(state: Any) -> Any:
        runner = new_runner(World(0, 1))
        runner.restore(state, None)
        runner.train_epoch(request(None))
        return [sample for batch in runner.operator.seen for sample in batch]

    (state, *first), (_, *second) = lab.apply_all_workers(interrupted)
    assert state["resume"]["position"]["pass_index"] == 2
    rest = lab.apply_all_workers(lambda: resumed(state))
    global_rest = [sample for pair in zip(first[1], second[1], strict=True) for batch in pair for sample in batch]
    assert rest[0] == rest[1] == global_rest
    used = [sample for seen in (first[0], second[0]) for sample in seen[-1]]
    assert sorted(used + global_rest) == list(range(12))


@pytest.mark.keras_in_turns("keras3")
def test_a_survivor_goes_on_alone_where_the_group_stopped(lab: TFTrainer) -> None:
    def left_alone() -> Any:
        runner = TFRunner(TFSettings(Line, {"batch_size": 2, "num_samples": 16}, SEED), World(rank(), 2))
        runner.setup()
        runner.train_epoch(request(2))
        replica_progress = runner.replica_progress()
        runner.regroup(World(0, 1), StateHandover())
        answer = runner.train_epoch(request(None))
        return replica_progress.obstacle, answer.metrics["num_samples"], runner.state()["models"]

    (obstacle, rest, first), (_, _, second) = lab.apply_all_workers(left_alone)
    assert obstacle is None
    assert rest == 8
    assert all(np.array_equal(a, b) for a, b in zip(first[0], second[0], strict=True))


class Marked(Line):
    """Notes what it is told of its batches."""

    infos: ClassVar[list[dict[str, Any]]] = []

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.infos.append(batch_info)
        return super().train_batch(batch, batch_info)


@pytest.mark.keras_in_turns("keras2")
def test_practice_is_marked_and_compiles(lab: TFTrainer) -> None:
    def warmed_up() -> Any:
        runner = TFRunner(TFSettings(Marked, {"batch_size": 2}, SEED, num_workers=2), World(0, 1))
        runner.setup()
        runner.warm_up()
        operator: Any = runner.operator
        marks = [info["warm_up"] for info in Marked.infos]
        return marks, operator._raysgd.train_function.experimental_get_tracing_count()

    for marks, number_of_graphs in lab.apply_all_workers(warmed_up):
        assert marks == [True, True]
        assert number_of_graphs >= 1, "what it compiled is kept"


def new_runner(world: World) -> TFRunner:
    runner = TFRunner(TFSettings(Noting, {"batch_size": 2}, SEED), world)
    runner.setup()
    return runner


def request(num_steps: int | None) -> EpochRequest:
    return EpochRequest(num_steps, {}, False, SEED)
