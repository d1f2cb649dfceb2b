"""`TFRunner`: the replica in each worker. It owns the operator, the position in the data and the timers.

Internal: what the class of this name in the old library could do is done by `TFTrainer`.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from raysgd._fitting import check_progress
from raysgd._meters import AverageMeterCollection
from raysgd.backends import tensorflow as backends
from raysgd.engine.replica import Capture
from raysgd.engine.types import DataLedger, Handover, Held, ReplicaProgress, World
from raysgd.exceptions import IncompatibleModelError, NotRegisteredError
from raysgd.replicas.batching import config_for_worker
from raysgd.replicas.epoch_run import EpochRun, RunState
from raysgd.replicas.epochs import EpochAnswer, EpochRequest, call_with_accepted
from raysgd.replicas.runner import ClassRunner
from raysgd.replicas.streams import Remainder
from raysgd.tf import _former_optimizer, datasets, fit_run, registration, serializing
from raysgd.tf.checkpoint_file import FORMER_OPTIMIZER
from raysgd.tf.creator_operator import CreatorOperator
from raysgd.tf.datasets import DatasetSignature
from raysgd.tf.fit_run import FitStream
from raysgd.tf.keras_sync import Synchronizer
from raysgd.tf.settings import TFSettings
from raysgd.tf.step import Step
from raysgd.tf.streams import BatchStream, DividedSource, OwnSource, Passes, Source
from raysgd.tf.training_operator import OperatorContext, TrainingOperator
from raysgd.utils import BATCH_SIZE

logger = logging.getLogger(__name__)

RESUME = "resume"  # key of what only snapshots and files carry: the position in the data and the step counter


@dataclass(frozen=True)
class RunnerFacts:
    """What the driver wants to know about a replica that was set up.

    Attributes:
        num_models: How many models are registered.
        num_optimizers: How many optimizers.
        train_data: What all ranks must agree on; None for a dataset that is not divided.
        validation_data: The same for validation.
        keeps_own_state: Whether the operator has a state of its own, which evaluation may change.
        epoch_obstacle: Why an epoch can only start over, in any case; None when it can continue.
    """

    num_models: int
    num_optimizers: int
    train_data: DatasetSignature | None
    validation_data: DatasetSignature | None
    keeps_own_state: bool
    epoch_obstacle: str | None = None


class TFRunner(ClassRunner):
    """Hosts one operator.

    Args:
        settings: What the operator is made from.
        world: The place among the replicas.
    """

    epoch = 0

    def __init__(self, settings: TFSettings, world: World) -> None:
        super().__init__(world, settings.snapshot_every_n_steps)
        self._settings = settings
        self._num_workers = settings.num_workers or world.size
        self._strategy = backends.strategy()
        counts_steps = self._num_workers > 1 or settings.snapshot_every_n_steps is not None
        self._synchronizer = Synchronizer(world, counts_steps) if self._strategy is None else Synchronizer(World(0, 1))
        self._train_stream: BatchStream | None = None
        self._validation = Remainder(self._open_validation)
        self._fit: FitStream | None = None
        self._resume: Mapping[str, Any] | None = None
        self._passes: dict[str, Passes] = {}
        self._num_exchanges = 0  # at the last step boundary

    @property
    def operator(self) -> TrainingOperator:
        """The live operator."""
        assert self._operator is not None
        return self._operator

    # ------------------------------------------------------------------------------------------------ replica

    def setup(self) -> RunnerFacts:
        """Builds the operator, which runs the user's `setup`, and gives all ranks rank 0's weights."""
        settings, world = self._settings, self._world
        makes_fit = issubclass(settings.training_operator_cls, CreatorOperator)
        if self._strategy is not None and not makes_fit:
            raise IncompatibleModelError(
                '`backend="mwms"` trains compiled models of creator functions, with `fit`. For an operator class use '
                '`backend="gloo"`.'
            )
        _seed(settings.seed)  # all alike: so that models begin equal, and shuffled datasets come in one order
        context = OperatorContext(settings, world, self._synchronizer, self._strategy)
        config = dict(settings.config) if makes_fit else config_for_worker(settings.config, self._num_workers)
        self._operator = settings.training_operator_cls(config, context)
        if makes_fit:
            self._fit = FitStream(self._passes_of("train_dataset", self.operator.train_dataset), self._synchronizer)
            self._operator._fit = self._fit
        self._synchronizer.registered = lambda: self.operator._models
        self._check_batches()
        self._build()
        self._synchronizer.share_first(self._weights())
        self._take_weights_in()
        self._part_ways()
        return self._facts()

    def _check_batches(self) -> None:
        operator = self.operator
        if len(operator._models) != 1:
            return
        shapes = registration.input_shapes_of(operator._models[0])
        for name in ("train_dataset", "validation_dataset"):
            if getattr(operator, name) is not None:
                datasets.check_batches_for(name, getattr(operator, name), shapes)

    def _build(self) -> None:
        """Makes all variables where that is possible, so that there is a state from the beginning."""
        operator = self.operator
        dataset = operator.train_dataset
        with operator._scope():
            for model in operator._models:
                if dataset is not None:
                    _try_to_build(model, dataset.element_spec)
            if self._fit is not None and self._has_traced_train_step(operator._models[0]):
                return
            if self._fit is None and len(operator._models) != len(operator._optimizers):
                return
            for model, optimizer in zip(operator._models, operator._optimizers, strict=self._fit is None):
                if model.built and model.trainable_variables:
                    registration.build_optimizer(optimizer, model.trainable_variables)

    def _take_weights_in(self) -> None:
        for model in self.operator._models:
            registration.take_weights_in(model)

    def _has_traced_train_step(self, model: Any) -> bool:
        """Whether a `train_step` of the user's, which knows what each optimizer changes, could be asked for that."""
        if self._strategy is not None or model.run_eagerly or not registration.has_own_train_step(model):
            return False
        self._synchronizer.watch_model(model, may_be_idle=True)
        try:
            with self._synchronizer.surfacing_errors():
                registration.trace_train_step(model, self.operator.train_dataset.element_spec)
        except IncompatibleModelError:
            raise
        except Exception as error:  # it says so itself in the first step, if it is no matter of tracing it this early
            logger.debug("a `train_step` could not be traced ahead of the first step: %s", error)
            return False
        return True

    def _part_ways(self) -> None:
        """What is drawn while training, for dropout say, is each rank's own from here on."""
        import tensorflow as tf

        tf.random.set_seed(self._settings.seed + self._world.rank)
        for variable in self._seeds():
            variable.assign(_array(variable) + np.uint32(self._world.rank))

    def _facts(self) -> RunnerFacts:
        operator = self.operator
        return RunnerFacts(
            num_models=len(operator._models),
            num_optimizers=len(operator._optimizers),
            train_data=self._signature(operator.train_dataset),
            validation_data=self._signature(operator.validation_dataset),
            keeps_own_state=type(operator).state_dict is not TrainingOperator.state_dict,
            epoch_obstacle=self._epoch_obstacle,
        )

    def _signature(self, dataset: Any) -> DatasetSignature | None:
        return datasets.signature_of(dataset) if dataset is not None and datasets.is_divided(dataset) else None

    def _own_capture(self) -> Capture:
        return Capture([_array(variable) for variable in self._seeds()])

    def _with_copy(self, part: Capture) -> Capture:
        state = self.state()
        return self._copies.add(part, state, _num_bytes(state))

    def _help_copy(self) -> None:
        if self._strategy is not None:
            self.state()

    def restore(self, shared_state: Mapping[str, Any], own_state: Any) -> None:
        """Takes over a snapshot or a checkpoint; nothing is changed if it does not fit.

        Args:
            shared_state: What `state` returned, here or elsewhere.
            own_state: The random states of this rank; None to go on with those that it has.

        Raises:
            ValueError: A part does not fit what is registered.
        """
        seeds = self._seeds()
        if own_state is None or len(own_state) != len(seeds):
            seeds, own_state = [], []
        _check_fit(seeds, own_state, "the random generators")
        self._apply(shared_state)
        self._run = None
        self._inside.clear()
        for variable, value in zip(seeds, own_state, strict=True):
            variable.assign(value)

    def restore_former(self, state: Mapping[str, Any]) -> str:
        """Takes over a file of the old library: the weights, the epoch, and what is known of the optimizer's variables.

        Args:
            state: What `checkpoint_file.read` made of it.

        Returns:
            Why the optimizer was left as it is; nothing if it was not.

        Raises:
            ValueError: The weights do not fit the model that is registered; nothing was changed.
        """
        operator, obstacle = self.operator, ""
        optimizers = self._values_of_optimizers()
        if len(optimizers) == 1:
            try:
                optimizers = [_former_optimizer.arranged(operator._optimizers[0], state[FORMER_OPTIMIZER])]
            except ValueError as error:
                obstacle = str(error)
        else:
            obstacle = f"the file is of one optimizer, and {len(optimizers)} are registered"
        own = {"operator": operator.state_dict(), "optimizers": optimizers}  # the old library had no operators
        self.restore({**state, **own}, None)
        return obstacle

    def _apply(self, state: Mapping[str, Any]) -> None:
        operator = self.operator
        targets = self._targets(state)
        for variables, values, what in targets:
            _check_fit(variables, values, what)
        check_progress(state["epoch"], state.get(RESUME))
        resume = dict(state.get(RESUME) or {})
        goes_on_in_fit = self._fit is not None and bool(resume.get("fit"))
        if goes_on_in_fit:
            fit_run.check_state(resume["fit"])
        own_state = copy.deepcopy(state["operator"])  # no copy fails when something has been replaced
        with operator._scope():
            for variables, values, _ in targets:
                for variable, value in zip(variables, values, strict=True):
                    variable.assign(value)
            self._take_weights_in()
        self.epoch = int(state["epoch"])
        operator.load_state_dict(own_state)
        self._resume = resume
        operator.global_step = resume.get("global_step", operator.global_step)
        self._train_stream = None
        self._validation.drop()
        if self._fit is not None and goes_on_in_fit:
            self._fit.resume(resume["fit"])

    def shutdown(self) -> None:
        """Drops the iterators. The operator itself stays usable."""
        self._train_stream = self._running = self._run = None
        self._validation.drop()
        self._inside.clear()
        self._copies.clear()

    # ------------------------------------------------------------------------------------------------ regrouping

    def replica_progress(self) -> ReplicaProgress:
        """How far the training call is that broke off or was held, or the last one that was completed."""
        replica_progress = super().replica_progress()
        if replica_progress.obstacle is None and self._stream().is_mid_pass and not self._train_passes.can_repeat():
            obstacle = "the train dataset is shuffled, and too large for a copy that repeats the order of this pass"
            return replace(replica_progress, obstacle=obstacle)
        return replica_progress

    def _words(self) -> str:
        if self._fit is not None:
            place = self._fit.state()
            return f"epoch {place['epoch']} of `fit`, {place['num_steps']} steps taken" if "epoch" in place else ""
        return super()._words()

    def _ledger(self) -> DataLedger | None:
        stream = self._fit if self._fit is not None else self._train_stream
        return stream.ledger() if stream is not None else None

    def _own_s(self) -> float | None:
        return self._synchronizer.own_s or None

    def _num_samples(self, run: EpochRun) -> int:
        return self._synchronizer.num_samples if self._fit is not None else super()._num_samples(run)

    @property
    def _is_whole(self) -> bool:
        return self._synchronizer.num_exchanges == self._num_exchanges if self._fit is None else self._fit.is_whole

    def _note_boundary(self) -> None:
        self._num_exchanges = self._synchronizer.num_exchanges

    @property
    def _group_obstacle(self) -> str | None:
        if self._strategy is not None:
            return "a process can be in one `MultiWorkerMirroredStrategy` only"
        for name, dataset in (("train", self.operator.train_dataset), ("test", self.operator.validation_dataset)):
            if dataset is not None and not datasets.is_divided(dataset):
                return f"the {name} dataset is not divided by the library (its auto-shard policy is OFF)"
        return None

    @property
    def _epoch_obstacle(self) -> str | None:
        operator = self.operator
        is_stock = type(operator).train_epoch in (TrainingOperator.train_epoch, CreatorOperator.train_epoch)
        if operator.resumes_epochs or (operator.resumes_epochs is None and is_stock):
            return self._group_obstacle
        return f"`{type(operator).__name__}` has a `train_epoch` of its own and does not set `resumes_epochs`"

    def warm_up(self) -> None:
        """Takes steps on zeros. What they change is taken over from another rank later, or put back."""
        operator = self.operator
        if not operator.warms_up_standby or self._epoch_obstacle is not None or operator.train_dataset is None:
            return
        self._synchronizer.rejoin(World(0, 1))  # no other rank is here yet
        try:
            with self._synchronizer.surfacing_errors(), self._scaling_losses():
                operator.warm_up()
        except Exception as error:  # in a real step the user would get the exception
            logger.warning("warm-up of a standby worker failed: %r", error)

    def regroup(self, world: World, handover: Handover) -> RunnerFacts:
        """Goes on in the new group; takes over the state of `handover.source` if it is among the takers."""
        stream = self._fit if self._fit is not None else self._train_stream
        if stream is not None:
            stream.break_off()
        self._detach()
        self._resume = {"position": self._position()}
        self._train_stream = None
        self._validation.drop()
        self._world = world
        self._synchronizer.rejoin(world)
        self._synchronizer.forget_call()  # the ranks are compared, and some of them are new
        self.operator._take_place(world)
        group = self._synchronizer.group
        if world.rank == handover.source and handover.takers:
            run = self._run.state(with_metrics=False) if self._run is not None else None
            group.send((self.state(), run), handover.takers)
        elif world.rank in handover.takers:
            self._take_over(*group.receive(handover.source))
        self._count_orphans(handover.orphans)
        self.operator.world_changed()
        return self._facts()

    def _take_over(self, state: Mapping[str, Any], run: RunState | None) -> None:
        self._apply(state)
        self._take_over_run(run)

    # ------------------------------------------------------------------------------------------------ epochs

    def train_epoch(self, request: EpochRequest) -> EpochAnswer | Held:
        """Runs the operator's `train_epoch` once."""
        if self._fit is not None:
            self._fit.end()  # one that an exception in user code broke off does not continue
        self._synchronizer.forget_call()
        self.operator._forget_stale_steps()
        return super().train_epoch(request)

    def _can_resume(self, stream: Any) -> bool:
        return self._epoch_obstacle is None

    def _pass_index(self, stream: Any) -> int:
        index: int = stream.pass_index if stream.is_mid_pass else self.epoch
        return index

    def _begin_pass(self) -> int:
        self.epoch += 1
        return self.epoch - 1

    def _count_own_epoch(self) -> None:
        self.epoch += 1  # one of Keras's `fit`, too

    @contextmanager
    def _training(self, run: EpochRun, stream: Any) -> Iterator[None]:
        synchronizer = self._synchronizer
        with synchronizer.surfacing_errors(), synchronizer.measuring(), self._scaling_losses():
            try:
                yield
            finally:
                synchronizer.step.forget()
            synchronizer.merge_statistics(self.operator._models)

    def _scaling_losses(self) -> AbstractContextManager[None]:
        """For loops of operators; a `fit` does it in its steps, between which users may evaluate by themselves."""
        return self._synchronizer.scaling_losses() if self._fit is None else nullcontext()

    def _returned_by_account(self, run: EpochRun) -> Any:
        return run.meters.summary() if self._fit is None else CreatorOperator.results_of(self._fit.logs)

    def _finish(self, run: EpochRun, returned: Any, request: EpochRequest) -> EpochAnswer:
        answer = super()._finish(run, returned, request)
        if self._fit is not None:
            self._fit.end()
        return answer

    def _new_meters(self) -> AverageMeterCollection:
        return AverageMeterCollection()

    def _extra_results(self) -> dict[str, Any]:
        return {} if self._fit is not None else super()._extra_results()

    def _plain(self, value: Any) -> Any:
        return _plain(value)

    def validate(self, request: EpochRequest) -> EpochAnswer:
        """Runs the operator's `validate` once."""
        operator = self.operator
        self._arm_timers(request.profile)
        with self._validation.stream(request) as stream:
            began_at = stream.num_steps_taken
            self._running = (stream, began_at, request.num_steps, request.info)
            try:
                scaling, timing = self._scaling_losses(), self._timers.record("validation")
                with self._synchronizer.surfacing_errors(), timing, scaling:
                    returned = call_with_accepted(
                        operator.validate,
                        stream.take(request.num_steps),
                        info=dict(request.info),
                        **({"num_steps": request.num_steps} if self._fit is not None else {}),
                    )
            finally:
                self._running = None
                self._synchronizer.validation_step.forget()
        return self._answer(returned, {}, request.profile, stream.num_steps_taken - began_at)

    def _open_validation(self, request: EpochRequest) -> BatchStream:
        source = self._source(self.operator.validation_dataset, "validation_dataset", training=False)
        return BatchStream(source, self._synchronizer.validation_step, lambda: 0)

    # ------------------------------------------------------------------------------------------------ data

    @property
    def _step(self) -> Step:
        return self._synchronizer.step

    def _training_stream(self, request: EpochRequest) -> Any:
        return self._stream()

    def _stream(self) -> Any:
        if self._fit is not None:
            return self._fit
        if self._train_stream is None:
            source = self._source(self.operator.train_dataset, "train_dataset", training=True)
            self._train_stream = BatchStream(source, self._synchronizer.step, self._begin_pass, self._undo)
            self._resume_position(self._train_stream)
        return self._train_stream

    def _source(self, dataset: Any, name: str, *, training: bool) -> Source:
        if dataset is None:
            return _Missing(name)
        if datasets.is_divided(dataset):
            # With a batch size of all workers together a step is the same for any number of them.
            num_joint = self._num_workers if BATCH_SIZE in self._settings.config else self._world.size
            passes = self._passes_of(name, dataset)
            return DividedSource(passes, self.operator._sharding, self._world, pads=training, num_joint=num_joint)
        if training and self._world.is_distributed:
            return OwnSource(dataset, backends.votes())
        return OwnSource(dataset, None)

    def _passes_of(self, name: str, dataset: Any) -> Passes:
        return self._passes.get(name) or self._passes.setdefault(name, Passes(dataset))

    @property
    def _train_passes(self) -> Passes:
        return self._passes_of("train_dataset", self.operator.train_dataset)

    def _undo(self) -> Callable[[], None]:
        """Remembers what a step without samples must not change: all that is not trained, and metrics."""
        operator = self.operator
        variables = [variable for model in operator._models for variable in model.non_trainable_variables]
        variables += [variable for metric in operator._metrics for variable in metric.variables]
        values = [_array(variable) for variable in variables]

        def redo() -> None:
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)

        return redo

    def _position(self) -> dict[str, Any] | None:
        """Where in the data the next batch is, for a dataset that is divided; of others it is unknown."""
        stream = self._train_stream
        if stream is None:
            return dict(self._resume["position"]) if self._resume and self._resume.get("position") else None
        if not isinstance(stream.source, DividedSource):
            return {"is_unknown": True, "pass_index": stream.pass_index} if stream.is_mid_pass else None
        is_mid_pass = stream.is_mid_pass
        return {
            "pass_index": stream.pass_index,
            "consumed": stream.consumed if is_mid_pass else 0,
            "is_mid_pass": is_mid_pass,  # also before its first step is done
            "seed": self._settings.seed,
        }

    def _resume_position(self, stream: BatchStream) -> None:
        resume, self._resume = self._resume, None
        position = (resume or {}).get("position")
        if position and position.get("is_unknown"):
            logger.warning(
                "epoch %s stopped in the middle, and the library does not divide this train dataset, so its position "
                "is unknown: reading it from the beginning",
                position["pass_index"],
            )
            return
        if not position or not isinstance(stream.source, DividedSource):
            return
        is_mid_pass = position.get("is_mid_pass", position["consumed"] > 0)
        num_passes = position["pass_index"] + (0 if is_mid_pass else 1)
        is_same_order = position["seed"] == self._settings.seed or not self._train_passes.is_shuffled
        is_same_order = is_same_order and stream.source.go_to_pass(num_passes)
        if not is_mid_pass:
            return
        if is_same_order:
            stream.resume(position["pass_index"], position["consumed"])
        else:
            logger.warning(
                "the train dataset is shuffled, and this process cannot repeat the order of the pass that was "
                "interrupted: starting a fresh pass. A new trainer with `seed=%s` could.",
                position["seed"],
            )

    # ------------------------------------------------------------------------------------------------ state

    def state(self) -> dict[str, Any]:
        """A copy of the state."""
        operator = self.operator
        if not operator._models:
            raise NotRegisteredError(
                f"`{type(operator).__name__}.setup` never called `register`: register models and optimizers there, so "
                "that the library can save and restore them."
            )
        return {
            "epoch": self.epoch,
            "operator": copy.deepcopy(operator.state_dict()),
            "models": [[_array(variable) for variable in registration.weights_of(model)] for model in operator._models],
            "optimizers": self._values_of_optimizers(),
            RESUME: {
                "global_step": operator.global_step,
                "position": self._position(),
                "fit": self._fit.state() if self._fit is not None else None,
            },
        }

    def _values_of_optimizers(self) -> list[list[Any]]:
        optimizers = self.operator._optimizers
        return [[_array(variable) for variable in registration.variables_of_optimizer(one)] for one in optimizers]

    def _targets(self, state: Mapping[str, Any]) -> list[tuple[list[Any], Sequence[Any], str]]:
        operator = self.operator
        targets = [
            (registration.weights_of(model), values, f"model {index}")
            for index, (model, values) in enumerate(zip(operator._models, state["models"], strict=True))
        ]
        targets += [
            (registration.variables_of_optimizer(optimizer), values, f"optimizer {index}")
            for index, (optimizer, values) in enumerate(zip(operator._optimizers, state["optimizers"], strict=True))
        ]
        return targets

    def _weights(self) -> list[Any]:
        return [variable for model in self.operator._models for variable in registration.weights_of(model)]

    def _seeds(self) -> list[Any]:
        """What layers of Keras 3 draw random numbers from: variables of models that are no weights."""
        known = {id(variable) for variable in self._weights()}
        return [
            variable
            for model in self.operator._models
            if model.built and not registration.is_legacy(model)
            for variable in model.non_trainable_variables
            if id(variable) not in known
        ]

    def architecture(self) -> list[str]:
        """The registered models without their weights, as JSON; a single one with what it can be compiled with."""
        operator = self.operator
        models, loss = operator._models, operator._loss
        if len(models) != 1 or len(operator._optimizers) != 1 or loss is None:
            return [serializing.model_to_json(model) for model in models]
        return [serializing.model_to_json(models[0], operator._optimizers[0], loss, operator._metrics)]

    def input_spec(self) -> Any:
        """What the train dataset yields."""
        return self.operator.train_dataset.element_spec


class _Missing:
    """Stands for a dataset that was not registered; an error only once somebody draws from it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def open(self, consumed: int) -> Any:
        raise NotRegisteredError(f"`{self._name}` was not registered: pass it to `register_data` in `setup`.")

    def num_steps(self) -> int | None:
        return None


def _seed(seed: int) -> None:
    import tensorflow as tf

    tf.keras.utils.set_random_seed(seed)  # of TensorFlow, NumPy and `random`, and what this Keras draws seeds from


def _try_to_build(model: Any, element_spec: Any) -> None:
    try:
        registration.build_model(model, element_spec)
    except Exception as error:  # it builds itself in the first step, as it would without us
        logger.debug("a model could not be built ahead of its first step: %s", error)


def _array(variable: Any) -> Any:
    """A copy of a variable's value."""
    return np.array(variable.numpy())


def _num_bytes(state: Mapping[str, Any]) -> int:
    return sum(array.nbytes for part in ("models", "optimizers") for arrays in state[part] for array in arrays)


def _plain(value: Any) -> Any:
    """Tensors as numbers where they have one element, and as arrays in any case."""
    if hasattr(value, "numpy"):
        value = value.numpy()
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else value


def _check_fit(variables: Sequence[Any], values: Sequence[Any], what: str) -> None:
    if not isinstance(values, Sequence) or not all(isinstance(value, np.ndarray | np.generic) for value in values):
        raise ValueError(f"The state of {what} is not a list of arrays. Nothing was loaded.")
    if len(variables) != len(values):
        raise ValueError(
            f"The state of {what} has {len(values)} arrays, and what is registered has {len(variables)} variables. "
            "Nothing was loaded; load it with the operator that saved it, and let models know their input shape."
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
        raise ValueError(f"The state of {what} does not fit what is registered, nothing was loaded. Shapes: {shapes}.")
