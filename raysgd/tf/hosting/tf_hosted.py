"""`TFHostedOperator`: a user's operator inside a worker, with what raysgd needs to run it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from raysgd.core.arrays.ray_batches import ray_batches_of
from raysgd.core.engine.shared.types import World
from raysgd.core.numbers.time_spent import USEFUL
from raysgd.exceptions import IncompatibleModelError
from raysgd.tf.creator_operator import CreatorOperator
from raysgd.tf.data import call_data
from raysgd.tf.fit import FitStream
from raysgd.tf.hosting.keras_state import KerasState, part_ways, random_states, restore_random_states, seed_alike
from raysgd.tf.hosting.tf_feed import TFFeed
from raysgd.tf.objects import datasets, learning_rates, naming, registration
from raysgd.tf.operator.internals import OperatorContext, TFSettings
from raysgd.tf.parallel import global_metrics
from raysgd.tf.parallel.keras_sync import Synchronizer
from raysgd.tf.parallel.step import TFStep
from raysgd.tf.training_operator import TrainingOperator
from raysgd.trainer.messages.epochs import EpochRequest
from raysgd.trainer.messages.facts import RunnerFacts
from raysgd.trainer.messages.prediction import PredictRequest, Work
from raysgd.trainer.messages.weight_sums import WeightSums, models_to_compare, sums_of_array, tolerance_of
from raysgd.trainer.worker import hosted
from raysgd.trainer.worker.data.epoch_run import EpochRun
from raysgd.trainer.worker.data.loop import Loop
from raysgd.trainer.worker.ledger import Ledger
from raysgd.trainer.worker.operator import check_is_set_up, is_stock, take_rank
from raysgd.utils import BATCH_SIZE

logger = logging.getLogger(__name__)

_OF_KERAS_2 = (
    "Argument(s) not recognized",
    "Invalid filepath extension",
    "File format not supported",
    "end in `.keras`",
)
"""Parts of Keras 3's error messages for Keras 2 code such as `Adam(lr=...)` or `model.save("folder")`."""
_LEGACY_KERAS = (
    "Keras 3 does not accept this. If the program is for Keras 2, change the line (`raysgd migrate` finds it), or set "
    "TF_USE_LEGACY_KERAS=1 before TensorFlow is imported, and install `tf_keras`."
)


class TFHostedOperator(hosted.HostedOperator):
    """A user's TensorFlow operator inside a worker, with the objects that provide its batches, loop and state."""

    settings: TFSettings
    operator: TrainingOperator
    loop: OperatorLoop
    state: KerasState
    feed: TFFeed

    def __init__(self, settings: TFSettings, world: World, ledger: Ledger) -> None:
        self._num_workers = settings.num_workers or world.size
        counts_steps = settings.recovery.snapshot_every_n_steps is not None
        self.synchronizer = Synchronizer(world, self._num_workers, counts_steps)
        # If the config sets the global batch size, each step must have that size even if workers are missing. The
        # number of the dataset's batches in a step is therefore the intended number of workers, not the current one.
        num_global = self._num_workers if BATCH_SIZE in settings.config else None
        feed = TFFeed(lambda: self.operator, self.synchronizer, world, settings.seed, num_global)
        super().__init__(settings, world, feed, ledger)

    def build(self) -> RunnerFacts:
        """Create the user's operator, copy rank 0's model weights to all ranks, and return facts for the driver."""
        settings, synchronizer = self.settings, self.synchronizer
        makes_fit = issubclass(settings.training_operator_cls, CreatorOperator)
        operator = self._make_operator(makes_fit)
        self.loop = self._loop_of(operator)
        self.state = KerasState(operator, self.feed, self.loop.fit)
        synchronizer.restrict_to(lambda: operator._models)
        _make_variables(operator, makes_fit, synchronizer)
        weights = [v for model in operator._models for v in registration.weights_of(model)]
        global_metrics.share_first(synchronizer.group, weights)
        for model in operator._models:
            registration.take_weights_in(model)
        part_ways(settings.seed, self.world.rank, operator._models)
        operator._raysgd.chosen_rates = learning_rates.read(operator._optimizers)
        return self.facts()

    def _make_operator(self, makes_fit: bool) -> TrainingOperator:
        """Create the operator and run the user's `setup` or creator functions, with the same seeds on all ranks."""
        settings = self.settings
        seed_alike(settings.seed)
        naming.begin_names()
        context = OperatorContext(settings, self.world, self.synchronizer)
        config = dict(settings.config) if makes_fit else settings.config_for(self._num_workers)
        try:
            self.operator = operator = settings.training_operator_cls(config=config, context=context)
        except ValueError as error:
            if any(text in str(error) for text in _OF_KERAS_2) and hasattr(error, "add_note"):  # Python 3.11 or later
                error.add_note(_LEGACY_KERAS)
            raise
        check_is_set_up(operator)
        obstacle = self.feed.obstacle("train")
        if settings.batch_options.split_batches and obstacle is not None:
            way_out = "Omit it, or register a dataset that the library can shard"
            raise ValueError(f"`split_batches=True` cannot work: {obstacle}. {way_out}.")
        if self._num_workers > 1:
            for dataset in filter(None, (operator.train_dataset, operator.validation_dataset)):
                datasets.refuse_sparse(dataset)
            if obstacle is None:
                refuse_stateful(operator._models)
        made: TrainingOperator = operator
        return made

    def _loop_of(self, operator: TrainingOperator) -> OperatorLoop:
        if not isinstance(operator, CreatorOperator):
            return OperatorLoop(operator, self.synchronizer, self.feed)
        loop = FitLoop(operator, self.synchronizer, self.feed)
        operator._raysgd.fit = loop.fit
        return loop

    def facts(self) -> RunnerFacts:
        operator = self.operator
        return RunnerFacts(
            num_models=len(operator._models),
            num_optimizers=len(operator._optimizers),
            seed=self.settings.seed,
            train_data=self._signature("train", operator.train_dataset),
            validation_data=self._signature("validation", operator.validation_dataset),
            keeps_own_state=not is_stock(operator, "state_dict", of=TrainingOperator),
            epoch_obstacle=self.epoch_obstacle,
            ray_batches={} if self.world.rank else ray_batches_of(operator._raysgd.data.ray_loaders),
            has_validation=operator.validation_dataset is not None or self.has_own_validate,
            keeps_global_batch=self.settings.keeps_global_batch or operator._raysgd.data.sharding == "global",
            batch_size=datasets.batch_size_of(operator.train_dataset),
        )

    def _signature(self, name: str, dataset: Any) -> str | None:
        stream = self.operator._raysgd.data.streams.get(name)
        if stream is not None:
            return stream.signature
        return datasets.signature_of(dataset) if dataset is not None and datasets.is_divided(dataset) else None

    @property
    def epoch_obstacle(self) -> str | None:
        return super().epoch_obstacle or self.group_obstacle

    def edited_by(self, candidate: TFHostedOperator) -> learning_rates.Rates:
        mine, other = self.operator, candidate.operator
        chosen = zip(mine._raysgd.chosen_rates, other._raysgd.chosen_rates, strict=True)
        present = learning_rates.read(mine._optimizers)  # the optimizer state of tf_keras does not include the rates
        wanted = [rate if new == old else new for (old, new), rate in zip(chosen, present, strict=True)]
        return learning_rates.differing(learning_rates.read(other._optimizers), wanted)

    def take_edited(self, edited: learning_rates.Rates) -> None:
        if edited:
            learning_rates.apply(edited, self.operator._optimizers)

    def follow_config(self) -> None:
        learning_rates.apply(self.operator._raysgd.chosen_rates, self.operator._optimizers)

    def warm_up(self) -> None:
        """Train on batches of zeros, to do one-time work such as tracing before the worker joins a group.

        Do nothing if the operator's `warms_up` is False, if interrupted epochs must start over, or if there is no
        training dataset.
        """
        operator = self.operator
        if not operator.warms_up or self.epoch_obstacle is not None or operator.train_dataset is None:
            return
        self.synchronizer.regroup(World(0, 1))  # a group of one rank, so that this step needs no other workers
        with self.synchronizer.exchanges.surfacing_errors():
            operator.warm_up()

    def take_rank(self, world: World) -> None:
        self.feed.take_rank(world)
        self.synchronizer.regroup(world)
        # Discard the measured times and sample counts. A new rank has none, and the ranks' values are compared.
        self.synchronizer.exchanges.forget_call()
        take_rank(self.operator, world)

    def send(self, state: Any, takers: Sequence[int]) -> None:
        self.synchronizer.group.send(state, takers)

    def receive(self, source: int, takers: Sequence[int]) -> Any:
        return self.synchronizer.group.receive(source, takers)

    def finish_regroup(self) -> None:
        """Do nothing. Keras models hold no reference to the group, so nothing needs an update."""

    @contextmanager
    def training(self, run: EpochRun, stream: Any) -> Iterator[None]:
        synchronizer = self.synchronizer
        synchronizer.exchanges.ledger = self.ledger
        with synchronizer.exchanges.surfacing_errors(), synchronizer.exchanges.measuring():
            try:
                yield
            finally:
                synchronizer.step.forget()
            global_metrics.merge_statistics(synchronizer.group, self.operator._models)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        with self.synchronizer.exchanges.surfacing_errors():
            try:
                yield
            finally:
                self.synchronizer.validation_step.forget()

    @contextmanager
    def predicting(self) -> Iterator[None]:
        """After the block, restore the random states, because a prediction must not affect later training.

        These are the seeds of Keras 3 layers, and the states of NumPy's and Python's global random generators.
        """
        with self.synchronizer.exchanges.surfacing_errors(), self.giving_back_random_numbers():
            yield

    def weight_sums(self) -> WeightSums | None:
        began, models = time.perf_counter(), models_to_compare(self.operator._models, self.operator.compares_ranks)
        built = [(number, model, each) for number, model in models if model.built for each in model.trainable_variables]
        if not built:
            return None
        names = [f"`{getattr(v, 'path', v.name)}` of model {number} (`{type(m).__name__}`)" for number, m, v in built]
        arrays = (np.asarray(variable.numpy()) for _, _, variable in built)  # a generator, to hold one array at a time
        rows = [(sums_of_array(array), tolerance_of(array.itemsize)) for array in arrays]
        numbers, tolerances = np.array([sums for sums, _ in rows]), tuple(tolerance for _, tolerance in rows)
        shapes = tuple(tuple(variable.shape) for _, _, variable in built)
        return WeightSums(tuple(names), shapes, numbers, tolerances, time.perf_counter() - began)

    @contextmanager
    def giving_back_random_numbers(self) -> Iterator[None]:
        """Restore the generators of NumPy, of Python, and of Keras 3 layers, which can be read.

        The generators of TensorFlow and of tf_keras layers are left as they are.
        """
        own, drawn = self.state.own(), random_states()
        try:
            yield
        finally:
            self.state.restore_own(own)
            restore_random_states(drawn)

    def to_predict(self, request: PredictRequest, work: Work, share: Any) -> Iterator[tuple[Any, int]]:
        return call_data.batches_to_predict(work)

    def as_array(self, value: Any) -> Any:
        return call_data.plain(value)


def refuse_stateful(models: Iterable[Any]) -> None:
    """Check that no recurrent layer carries its state from batch to batch (`stateful=True`).

    Raises:
        IncompatibleModelError: A recurrent layer is stateful.
    """
    for layer in (layer for model in models for layer in registration.layers_in(model)):
        if hasattr(layer, "cell") and layer.stateful:
            raise IncompatibleModelError(
                f"`{type(layer).__name__}(stateful=True)` cannot be divided, because its state belongs to rows of the "
                "previous batch, which other workers may have. Use `stateful=False` or `num_workers=1`, or let each "
                "worker read its own sequences: `raysgd.tf.prepare_dataset_shard(dataset)`."
            )


def _make_variables(operator: TrainingOperator, uses_fit: bool, synchronizer: Synchronizer) -> None:
    """Create the variables of models and optimizers before the first step, if that is possible.

    Args:
        operator: Operator with registered models and optimizers.
        uses_fit: True if Keras's `fit` trains the model. If the user has overridden the model's `train_step`, this
            method is then traced, to create the variables of all optimizers that it uses.
        synchronizer: Replaces methods of the model before its `train_step` is traced; see `Synchronizer.watch_model`.
    """
    dataset = operator.train_dataset
    for model in operator._models:
        if dataset is not None:
            _works_ahead("build a model", registration.build_model, model, dataset.element_spec)
    if uses_fit and _has_traced_train_step(operator, synchronizer):
        return
    if not uses_fit and len(operator._models) != len(operator._optimizers):
        return
    for model, optimizer in zip(operator._models, operator._optimizers, strict=not uses_fit):
        if model.built and model.trainable_variables:
            registration.build_optimizer(optimizer, model.trainable_variables)


def _works_ahead(what: str, function: Callable[..., Any], *args: Any) -> bool:
    """Call a function that does work of the first step in advance. Return True if the function succeeds.

    Args:
        what: Description of the work for the log, such as "build a model".
        function: Function that does the work.
        args: Arguments of `function`.

    Raises:
        IncompatibleModelError: raysgd does not support the model. Other exceptions are only logged.
    """
    try:
        function(*args)
    except IncompatibleModelError:
        raise
    except Exception as error:  # from user code; if the cause is permanent, the first step raises the error again
        logger.debug("could not %s ahead of the first step: %s", what, error)
        return False
    return True


def _has_traced_train_step(operator: TrainingOperator, synchronizer: Synchronizer) -> bool:
    """Trace the user's `train_step` to create its optimizers' variables. Return True if tracing succeeded.

    Return False without tracing if the model runs eagerly or uses Keras's own `train_step`.
    """
    model = operator._models[0]
    if model.run_eagerly or not registration.has_own_train_step(model):
        return False
    synchronizer.watch_model(model)

    def trace() -> None:
        with synchronizer.exchanges.surfacing_errors():
            registration.trace_train_step(model, operator.train_dataset.element_spec)

    return _works_ahead("trace a `train_step`", trace)


class OperatorLoop(Loop):
    """The training loop of an operator whose `train_epoch` iterates over batches that raysgd draws.

    Attributes:
        fit: Holds the position of Keras's `fit`. None in this class, because no `fit` runs.
    """

    fit: FitStream | None = None
    _feed: TFFeed

    def __init__(self, operator: TrainingOperator, synchronizer: Synchronizer, feed: TFFeed) -> None:
        super().__init__(feed)
        self._operator = operator
        self._synchronizer = synchronizer
        self._num_exchanges = 0  # number of completed all-reduces when the last step ended

    @property
    def leg(self) -> TFStep:
        return self._synchronizer.step

    def plain(self, value: Any) -> Any:
        """Convert a scalar tensor to a number, and any other tensor to an array."""
        value = value.numpy() if hasattr(value, "numpy") else value
        return value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else value

    @property
    def is_whole(self) -> bool:
        return self._synchronizer.exchanges.num_completed == self._num_exchanges

    def note_boundary(self) -> None:
        self._num_exchanges = self._synchronizer.exchanges.num_completed

    @property
    def own_s(self) -> float | None:
        return self._synchronizer.exchanges.own_so_far() or None

    def begin_call(self) -> None:
        self._synchronizer.exchanges.forget_call()
        internals = self._operator._raysgd
        internals.forget_stale_steps()
        internals.num_left_out = 0

    @property
    def _is_mid_pass(self) -> bool:
        return bool((self._feed.position() or {}).get("is_mid_pass"))

    @property
    def order_obstacle(self) -> str | None:
        if self._is_mid_pass and not self._feed.train_passes.can_repeat():
            return "the train dataset is shuffled, and too large for a copy that repeats the order of this pass"
        return None


class FitLoop(OperatorLoop):
    """The training loop of an operator that calls Keras's `fit`.

    Keras draws the batches itself, so raysgd cannot measure the time spent waiting for data.
    """

    first_bin = USEFUL
    fit: FitStream
    _operator: CreatorOperator

    def __init__(self, operator: CreatorOperator, synchronizer: Synchronizer, feed: TFFeed) -> None:
        super().__init__(operator, synchronizer, feed)
        self.fit = FitStream(feed.train_passes, synchronizer.exchanges)

    @property
    def is_whole(self) -> bool:
        return self.fit.is_whole

    def begin_call(self) -> None:
        self.fit.end()  # forget the position of the last `fit`, which may have ended with an exception in user code
        super().begin_call()

    def end_call(self) -> None:
        self.fit.end()

    def stream(self, request: EpochRequest, *, is_begun: bool = False) -> FitStream:
        return self.fit

    def pass_index(self, stream: Any) -> int:
        return self.fit.pass_index if self._is_mid_pass else self._feed.epoch

    @property
    def _is_mid_pass(self) -> bool:
        return self.fit.is_mid_pass

    def can_resume(self, stream: Any) -> bool:
        return True

    def break_off(self) -> None:
        self.fit.break_off()
        self._synchronizer.undo.put_back()

    def progress_text(self) -> str:
        place = self.fit.state()
        return f"epoch {place['epoch']} of `fit`, {place['num_steps']} steps taken" if "epoch" in place else ""

    def num_samples(self, run: EpochRun) -> int:
        return self._synchronizer.exchanges.num_samples

    def results(self, run: EpochRun) -> Any:
        return CreatorOperator.results_of(self.fit.logs)

    def extra_results(self) -> dict[str, Any]:
        return {}

    def validation_options(self, request: EpochRequest) -> Mapping[str, Any]:
        return {"num_steps": request.num_steps}
