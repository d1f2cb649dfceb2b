"""`TFHostedOperator`: a user's operator inside a worker, with what raysgd needs to run it: its steps and its state."""

from __future__ import annotations

import copy
import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np

from raysgd.core.arrays.user_data import ray_batches_of
from raysgd.core.engine.shared.types import World
from raysgd.core.numbers.meters import AverageMeterCollection
from raysgd.core.numbers.timing import USEFUL
from raysgd.exceptions import IncompatibleModelError
from raysgd.tf.creator_operator import CreatorOperator
from raysgd.tf.data import sources
from raysgd.tf.fit import FitStream, check_state
from raysgd.tf.hosting.tf_feed import FitFeed, TFFeed
from raysgd.tf.objects import datasets, registration
from raysgd.tf.parallel import global_metrics
from raysgd.tf.parallel.keras_sync import Synchronizer
from raysgd.tf.parallel.step import TFStep
from raysgd.tf.training_operator import OperatorContext, TFSettings, TrainingOperator
from raysgd.trainer.messages.comparison import WeightSums, models_to_compare, sums_of_array, tolerance_of
from raysgd.trainer.messages.epochs import EpochRequest, RunnerFacts
from raysgd.trainer.messages.prediction import PredictRequest, Work
from raysgd.trainer.worker import hosted
from raysgd.trainer.worker.ledger import Ledger
from raysgd.trainer.worker.operator import check_is_set_up, is_stock
from raysgd.trainer.worker.replica_state import RESUME, ReplicaState, StateCopy
from raysgd.trainer.worker.step_loop import StepLoop, StepParts
from raysgd.utils import BATCH_SIZE


class KerasState(ReplicaState):
    """Reads and loads the state of a replica: models, optimizers, and the position in the data or in Keras's `fit`.

    Args:
        operator: Operator with the registered objects and the user's own state.
        feed: Object that holds the position in the data.
        fit: Holds the position of Keras's `fit`. None if the operator draws batches itself.
    """

    def __init__(self, operator: TrainingOperator, feed: TFFeed, fit: FitStream | None) -> None:
        super().__init__(operator, feed)
        self._fit = fit

    def read(self) -> dict[str, Any]:
        state = super().read()
        return {**state, "operator": copy.deepcopy(state["operator"])}

    def _parts(self) -> dict[str, Any]:
        models = self._operator._models
        undo = self._operator._raysgd.context.synchronizer.undo
        return {
            "models": [[*map(_array, undo.values_of(registration.weights_of(model)))] for model in models],
            "optimizers": [
                [_array(variable) for variable in registration.variables_of_optimizer(optimizer)]
                for optimizer in self._operator._optimizers
            ],
        }

    def _more_progress(self) -> dict[str, Any]:
        return {"fit": None if self._fit is None else self._fit.state()}

    def _apply_more_progress(self, resume: Mapping[str, Any]) -> None:
        if self._fit is not None and resume.get("fit"):
            self._fit.resume(resume["fit"])

    def copy_for_driver(self, rank: int) -> StateCopy | None:
        if rank:
            return None
        state = self.read()
        arrays = [array for part in ("models", "optimizers") for arrays in state[part] for array in arrays]
        return StateCopy(state, sum(array.nbytes for array in arrays))

    def own(self) -> list[Any]:
        return [_array(variable) for variable in self._seeds()]

    def check_own(self, own: Sequence[Any]) -> None:
        seeds = self._seeds()
        if len(own) == len(seeds):  # otherwise, the state is of a model with other layers: ignore its seeds
            _check_fit(seeds, own, "the random generators")

    def restore_own(self, own: Sequence[Any]) -> None:
        seeds = self._seeds()
        if len(own) == len(seeds):
            for variable, value in zip(seeds, own, strict=True):
                variable.assign(value)

    def _seeds(self) -> list[Any]:
        return seeds_of(self._operator._models)

    def _check_parts(self, state: Mapping[str, Any]) -> None:
        for variables, values, what in self._targets(state):
            _check_fit(variables, values, what)
        of_fit = (state.get(RESUME) or {}).get("fit")
        if self._fit is not None and of_fit:
            check_state(of_fit)

    def _apply_parts(self, state: Mapping[str, Any]) -> None:
        for variables, values, _ in self._targets(state):
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)
        for model in self._operator._models:
            registration.take_weights_in(model)

    def _targets(self, state: Mapping[str, Any]) -> list[tuple[list[Any], Sequence[Any], str]]:
        operator = self._operator
        targets = [
            (registration.weights_of(model), values, f"model {index}")
            for index, (model, values) in enumerate(zip(operator._models, state["models"], strict=True))
        ]
        targets += [
            (registration.variables_to_load(optimizer, values), values, f"optimizer {index}")
            for index, (optimizer, values) in enumerate(zip(operator._optimizers, state["optimizers"], strict=True))
        ]
        return targets


def _array(variable: Any) -> Any:
    """Copy a variable's value to an array."""
    return np.array(variable.numpy())


def _check_fit(variables: Sequence[Any], values: Sequence[Any], what: str) -> None:
    if not isinstance(values, Sequence) or not all(isinstance(value, np.ndarray | np.generic) for value in values):
        raise ValueError(f"The state of {what} is not a list of arrays. Nothing was loaded.")
    if len(variables) != len(values):
        raise ValueError(
            f"The state of {what} has {len(values)} arrays, but this trainer has {len(variables)} variables for it, so "
            "nothing was loaded. Load the state with the operator that saved it, and give models their input shape."
        )
    shapes = [
        f"{index}: {np.shape(value)} instead of {tuple(variable.shape)}"
        for index, (variable, value) in enumerate(zip(variables, values, strict=True))
        if tuple(variable.shape) != np.shape(value)
    ]
    strangers = [np.asarray(value).dtype.name for value in values if np.asarray(value).dtype.kind in "SUMmO"]
    if strangers:
        raise ValueError(
            f"The state of {what} has arrays of {strangers[0]}, which are not numbers. Nothing was loaded."
        )
    if shapes:
        raise ValueError(
            f"The state of {what} does not match the variables of this trainer, so nothing was loaded. Shapes: "
            f"{shapes}."
        )


def part_ways(seed: int, rank: int, models: Sequence[Any]) -> None:
    """Seed TensorFlow and Keras 3 layers differently on each rank, so that ranks draw different dropout masks.

    Call this after `setup`. It does not change the global random generators of NumPy and Python.
    """
    import tensorflow as tf

    tf.random.set_seed(seed + rank)
    for variable in seeds_of(models):
        variable.assign(np.array(variable.numpy()) + np.uint32(rank))


def seeds_of(models: Sequence[Any]) -> list[Any]:
    """Return the variables in which Keras 3 layers store random seeds: all variables that are not weights."""
    known = {id(variable) for model in models for variable in registration.weights_of(model)}
    return [
        variable
        for model in models
        if model.built and not registration.is_legacy(model)
        for variable in model.non_trainable_variables
        if id(variable) not in known
    ]


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
    parts: KerasParts
    state: KerasState
    feed: TFFeed
    as_array = staticmethod(sources.plain)

    def __init__(self, settings: TFSettings, world: World, ledger: Ledger) -> None:
        self._num_workers = settings.num_workers or world.size
        counts_steps = settings.recovery.snapshot_every_n_steps is not None
        self.synchronizer = Synchronizer(world, self._num_workers, counts_steps)
        # If the config sets the global batch size, each step must have that size even if workers are missing. The
        # number of the dataset's batches in a step is therefore the intended number of workers, not the current one.
        num_global = self._num_workers if BATCH_SIZE in settings.config else None
        kind = FitFeed if issubclass(settings.training_operator_cls, CreatorOperator) else TFFeed
        feed = kind(lambda: self.operator, self.synchronizer, world, settings.seed, num_global)
        super().__init__(settings, world, feed, ledger)

    def build(self) -> RunnerFacts:
        """Create the user's operator, copy rank 0's model weights to all ranks, and return facts for the driver."""
        settings, synchronizer = self.settings, self.synchronizer
        makes_fit = issubclass(settings.training_operator_cls, CreatorOperator)
        operator = self._make_operator(makes_fit)
        self.parts = (FitParts if makes_fit else KerasParts)(operator, synchronizer, self.feed, synchronizer.step)
        if self.feed.fit is not None:
            operator._raysgd.fit = self.feed.fit
        self.state = KerasState(operator, self.feed, self.feed.fit)
        synchronizer.restrict_to(lambda: operator._models)
        _make_variables(operator, makes_fit, synchronizer)
        weights = [v for model in operator._models for v in registration.weights_of(model)]
        global_metrics.share_first(synchronizer.group, weights)
        for model in operator._models:
            registration.take_weights_in(model)
        part_ways(settings.seed, self.world.rank, operator._models)
        operator._raysgd.chosen = registration.read_rates(operator._optimizers)
        return self.facts()

    def _make_operator(self, makes_fit: bool) -> TrainingOperator:
        """Create the operator and run the user's `setup` or creator functions, with the same seeds on all ranks."""
        import tensorflow as tf

        settings = self.settings
        # This seeds TensorFlow, NumPy and `random`, from which layers draw their seeds.
        tf.keras.utils.set_random_seed(settings.seed)
        registration.begin_names()
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
        return operator

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

    def change_config(self, settings: TFSettings) -> list[str]:
        super().change_config(settings)
        changed = settings.config_changes[-1].keys() - {"fit_config", "evaluate_config"}  # each call reads these
        return sorted(changed) if is_stock(self.operator, "config_changed") else []

    def edited_by(self, candidate: TFHostedOperator) -> registration.Rates:
        mine, other = self.operator, candidate.operator
        chosen = zip(mine._raysgd.chosen, other._raysgd.chosen, strict=True)
        # The optimizer state of tf_keras does not include the rates.
        present = registration.read_rates(mine._optimizers)
        wanted = [rate if new == old else new for (old, new), rate in zip(chosen, present, strict=True)]
        return registration.differing_rates(registration.read_rates(other._optimizers), wanted)

    def take_edited(self, edited: registration.Rates) -> None:
        if edited:
            registration.set_rates(edited, self.operator._optimizers)

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
        # Discard the sample counts. A new rank has none, and the ranks' values are compared.
        self.synchronizer.exchanges.forget_call()
        self.operator._raysgd.take_rank(self.operator, world)

    def send(self, state: Any, takers: Sequence[int]) -> None:
        self.synchronizer.group.send(state, takers)

    def receive(self, source: int, takers: Sequence[int]) -> Any:
        return self.synchronizer.group.receive(source, takers)

    @contextmanager
    def evaluating(self) -> Iterator[KerasParts]:
        synchronizer, internals = self.synchronizer, self.operator._raysgd
        with synchronizer.exchanges.surfacing_errors():
            try:
                internals.step = synchronizer.validation_step
                yield KerasParts(self.operator, synchronizer, self.feed, internals.step)
            finally:
                internals.step.forget()
                internals.step = synchronizer.step

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
        of_numpy, of_python = np.random.get_state(), random.getstate()
        try:
            with super().giving_back_random_numbers():
                yield
        finally:
            np.random.set_state(of_numpy)
            random.setstate(of_python)

    def to_predict(self, request: PredictRequest, work: Work, share: Any) -> Iterator[tuple[Any, int]]:
        return sources.batches_to_predict(work)


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


class KerasParts(StepParts):
    """The steps of an operator whose `train_epoch` iterates over batches that raysgd draws.

    Args:
        operator: The operator.
        synchronizer: Averages gradients over the ranks.
        feed: Provides the data.
        step: The current step: that of training, or that of validation.
    """

    _feed: TFFeed

    def __init__(self, operator: TrainingOperator, synchronizer: Synchronizer, feed: TFFeed, step: TFStep) -> None:
        super().__init__(feed, step)
        self._operator, self._synchronizer = operator, synchronizer
        self._num_exchanges = 0  # number of completed all-reduces when the last step ended

    def takes_padding(self, batch: Any) -> bool:
        """Take part in a step for which only other ranks have samples, without calling the user's `train_batch`.

        This rank repeats the all-reduces of an earlier step with a weight of zero. If there was no earlier step, it
        traces the operator's `train_step` to find out which all-reduces a step has.

        Raises:
            IncompatibleModelError: There was no earlier step, and the user has overridden `train_batch`. It is
                therefore unknown which all-reduces a step has.
        """
        operator, synchronizer = self._operator, self._synchronizer
        if self._leg is not synchronizer.step:  # a validation just leaves the batch out
            return True
        if not self._leg.usual and not is_stock(operator, "train_batch", of=TrainingOperator):
            raise IncompatibleModelError(
                f"The first step of this process has no sample for worker {operator.world_rank}, so it is unknown "
                "which steps your `train_batch` takes: make the batches larger."
            )
        synchronizer.take_part(operator.train_step, batch)
        operator._raysgd.num_left_out += 1
        return True

    def plain(self, value: Any) -> Any:
        """Convert a scalar tensor to a number, and any other tensor to an array."""
        value = value.numpy() if hasattr(value, "numpy") else value
        return value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else value

    @property
    def can_be_source(self) -> bool:
        return self._synchronizer.exchanges.num_completed == self._num_exchanges

    def commit(self) -> None:
        self.note_committed()
        self._leg.confirm()

    def note_committed(self) -> None:
        self._num_exchanges = self._synchronizer.exchanges.num_completed

    @contextmanager
    def training(self, hosted: Any, call: Any, loop: StepLoop) -> Iterator[None]:
        synchronizer, fit = self._synchronizer, self._feed.fit
        with synchronizer.exchanges.surfacing_errors(), synchronizer.exchanges.measuring(hosted.ledger):
            try:
                if fit is not None:
                    hosted.ledger.enter(USEFUL)
                with nullcontext() if fit is None else fit.calling(partial(loop.committed, False)):
                    yield
            finally:
                synchronizer.step.forget()
            global_metrics.merge_statistics(synchronizer.group, self._operator._models)

    def begin_call(self) -> None:
        self._synchronizer.exchanges.forget_call()
        internals = self._operator._raysgd
        internals.forget_stale_steps()
        internals.num_left_out = 0


class FitParts(KerasParts):
    """The steps of an operator that calls Keras's `fit`.

    Keras draws the batches itself, so raysgd cannot measure the time spent waiting for data.
    """

    _feed: FitFeed

    @property
    def can_be_source(self) -> bool:
        return self._feed.fit.is_whole

    def begin_call(self) -> None:
        self._feed.fit.end()  # forget the position of the last `fit`, which may have ended with an exception
        super().begin_call()

    def end_call(self) -> None:
        self._feed.fit.end()

    def num_samples(self, meters: AverageMeterCollection) -> int:
        return self._synchronizer.exchanges.num_samples

    def results(self, meters: AverageMeterCollection) -> Any:
        return CreatorOperator.results_of(self._feed.fit.logs)

    def extra_results(self) -> dict[str, Any]:
        return {}

    def validation_options(self, request: EpochRequest) -> Mapping[str, Any]:
        return {"num_steps": request.num_steps}
