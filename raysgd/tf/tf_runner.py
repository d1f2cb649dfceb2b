"""`TFRunner`: the replica in each worker. It owns the operator, the position in the data and the timers."""

from __future__ import annotations

import copy
import importlib
import json
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from raysgd._batching import config_for_worker
from raysgd._meters import MetricSummary
from raysgd._timers import TimerCollection
from raysgd.backends import tensorflow as backends
from raysgd.engine.epochs import EpochAnswer, EpochRequest, Progress, call_with_accepted
from raysgd.engine.replica import Capture
from raysgd.engine.results import WorkerMetrics, as_number
from raysgd.engine.types import World
from raysgd.exceptions import IncompatibleModelError, NotRegisteredError
from raysgd.tf import datasets, registry
from raysgd.tf.creator_operator import CreatorOperator
from raysgd.tf.datasets import DatasetSignature
from raysgd.tf.keras_sync import Step, Synchronizer
from raysgd.tf.streams import Agreement, BatchStream, DividedSource, OwnSource, Passes, Source
from raysgd.tf.training_operator import OperatorContext, TrainingOperator

logger = logging.getLogger(__name__)

RESUME = "resume"  # key of what only snapshots and files carry: the position in the data and the step counter
_INLINE_BYTES = 65536  # a state up to this size travels with the answer; a call of its own would cost more


@dataclass(frozen=True)
class RunnerSpec:
    """What every replica is made from."""

    operator_cls: type[TrainingOperator]
    config: Mapping[str, Any]
    seed: int
    use_gpu: bool = False
    verbose: bool | int | str = False


@dataclass(frozen=True)
class RunnerFacts:
    """What the driver wants to know about a replica that was set up.

    Attributes:
        num_models: How many models are registered.
        num_optimizers: How many optimizers.
        train_data: What all ranks must agree on; None for a dataset that is not divided.
        validation_data: Likewise.
        keeps_own_state: Whether the operator has a state of its own, which evaluation may change.
    """

    num_models: int
    num_optimizers: int
    train_data: DatasetSignature | None
    validation_data: DatasetSignature | None
    keeps_own_state: bool


@dataclass(frozen=True)
class Completed:
    """How far a replica came.

    Attributes:
        epoch: Passes begun.
        num_samples: Samples of the last of them that all ranks have trained on; 0 between passes.
        global_step: Steps completed.
    """

    epoch: int
    num_samples: int
    global_step: int


class TFRunner:
    """Hosts one operator.

    Args:
        spec: What the operator is made from.
        world: The place among the replicas.
    """

    def __init__(self, spec: RunnerSpec, world: World) -> None:
        self._spec = spec
        self._world = world
        self._operator: TrainingOperator | None = None
        self._strategy = backends.strategy()
        self._synchronizer = Synchronizer(World(0, 1) if self._strategy is not None else world)
        self._timers = TimerCollection()
        self._train_stream: BatchStream | None = None
        self._validation_stream: BatchStream | None = None
        self._agreement: Agreement | None = None
        self._resume: Mapping[str, Any] | None = None
        self._passes: dict[str, Passes] = {}
        self._captured: dict[int, dict[str, Any]] = {}
        self._next_token = 0
        self._running: tuple[BatchStream, int, int | None, Mapping[str, Any]] | None = None
        self.epoch = 0

    @property
    def operator(self) -> TrainingOperator:
        """The live operator."""
        assert self._operator is not None
        return self._operator

    # ------------------------------------------------------------------------------------------------ replica

    def setup(self) -> RunnerFacts:
        """Builds the operator, which runs the user's `setup`, and gives all ranks rank 0's weights."""
        spec, world = self._spec, self._world
        makes_fit = issubclass(spec.operator_cls, CreatorOperator)
        if self._strategy is not None and not makes_fit:
            raise IncompatibleModelError(
                '`backend="mwms"` trains compiled models of creator functions, with `fit`. For an operator class use '
                '`backend="gloo"`.'
            )
        _seed(spec.seed)  # all alike: so that models begin equal, and shuffled datasets come in one order
        context = OperatorContext(
            world=world,
            synchronizer=self._synchronizer,
            strategy=self._strategy,
            use_gpu=spec.use_gpu,
            verbose=spec.verbose,
        )
        config = dict(spec.config) if makes_fit else config_for_worker(spec.config, world.size)
        self._operator = spec.operator_cls(config, context)
        self._build()
        self._synchronizer.share_first(self._weights())
        self._part_ways()
        return self._facts()

    def _build(self) -> None:
        """Makes all variables where that is possible, so that there is a state from the beginning."""
        operator = self.operator
        dataset = operator.train_dataset
        with operator._scope():
            for model in operator._models:
                if dataset is not None:
                    _try_to_build(model, dataset.element_spec)
            if len(operator._models) != len(operator._optimizers):
                return
            for model, optimizer in zip(operator._models, operator._optimizers, strict=True):
                if model.built and model.trainable_variables:
                    registry.build_optimizer(optimizer, model.trainable_variables)

    def _part_ways(self) -> None:
        """What is drawn while training, for dropout say, is each rank's own from here on."""
        import tensorflow as tf

        tf.random.set_seed(self._spec.seed + self._world.rank)
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
        )

    def _signature(self, dataset: Any) -> DatasetSignature | None:
        return datasets.signature_of(dataset) if dataset is not None and datasets.is_divided(dataset) else None

    def capture(self, landed_token: int | None) -> Capture:
        """Copies the state once: rank 0 what all ranks share, every rank what its layers draw random numbers from."""
        rank_state = [_array(variable) for variable in self._seeds()]
        if self._world.rank and self._strategy is None:
            return Capture(rank_state)
        state = self.state()  # with a strategy on all ranks: reading may involve them all
        if self._world.rank:
            return Capture(rank_state)
        for token in [token for token in self._captured if landed_token is not None and token <= landed_token]:
            del self._captured[token]
        if _num_bytes(state) <= _INLINE_BYTES:
            return Capture(rank_state, shared_state=state)
        self._next_token += 1
        self._captured[self._next_token] = state
        return Capture(rank_state, token=self._next_token)

    def fetch(self, token: int) -> dict[str, Any]:
        """The copy of the state that `token` names."""
        return self._captured[token]

    def restore(self, shared_state: Mapping[str, Any], rank_states: Sequence[Any]) -> None:
        """Takes over a snapshot or a checkpoint; nothing is changed if it does not fit.

        Args:
            shared_state: What `state` returned, here or elsewhere.
            rank_states: By rank; there may be fewer or more of them than ranks.

        Raises:
            ValueError: A part does not fit what is registered.
        """
        operator = self.operator
        targets = self._targets(shared_state)
        for variables, values, what in targets:
            _check_fit(variables, values, what)
        with operator._scope():
            for variables, values, _ in targets:
                for variable, value in zip(variables, values, strict=True):
                    variable.assign(value)
        self.epoch = int(shared_state["epoch"])
        operator.load_state_dict(copy.deepcopy(shared_state["operator"]))
        self._resume = dict(shared_state.get(RESUME) or {})
        operator.global_step = self._resume.get("global_step", operator.global_step)
        self._train_stream = self._validation_stream = None
        own = rank_states[self._world.rank] if self._world.rank < len(rank_states) else None
        seeds = self._seeds()
        if own is not None and len(own) == len(seeds):
            for variable, value in zip(seeds, own, strict=True):
                variable.assign(value)

    def shutdown(self) -> None:
        """Drops the iterators. The operator itself stays usable."""
        self._train_stream = self._validation_stream = self._running = None
        self._captured.clear()

    # ------------------------------------------------------------------------------------------------ epochs

    def train_epoch(self, request: EpochRequest) -> EpochAnswer:
        """Runs the operator's `train_epoch` once; then what models keep beside their weights is averaged."""
        operator = self.operator
        self._arm_timers(request.profile)
        stream = self._training_stream()
        epoch_idx = stream.pass_index if stream.is_mid_pass else self.epoch
        info = {**request.info, **operator._own_info(request.num_steps, epoch_idx)}
        began_at, epoch_before = stream.num_steps_taken, self.epoch
        self._running = (stream, began_at, request.num_steps, info)
        with self._synchronizer.surfacing_errors():
            with self._timers.record("train_epoch"):
                returned = call_with_accepted(
                    operator.train_epoch,
                    stream.take(request.num_steps),
                    info=info,
                    num_steps=request.num_steps,
                    epoch_idx=epoch_idx,
                )
            self._synchronizer.merge_statistics(operator._models)
        self._running = None
        if stream.num_steps_taken == began_at and self.epoch == epoch_before:
            self.epoch += 1  # an epoch that brought its own data, or Keras's `fit`
        extra = {} if isinstance(operator, CreatorOperator) else {"epoch": self.epoch}
        answer = self._answer(returned, extra, request.profile, stream.num_steps_taken - began_at)
        return replace(answer, epoch_idx=epoch_idx)

    def validate(self, request: EpochRequest) -> EpochAnswer:
        """Runs the operator's `validate` once."""
        operator = self.operator
        self._arm_timers(request.profile)
        if self._validation_stream is None:
            source = self._source(operator.validation_dataset, "validation_dataset", training=False)
            self._validation_stream = BatchStream(source, Step(), lambda: 0)
        stream = self._validation_stream
        began_at = stream.num_steps_taken
        self._running = (stream, began_at, request.num_steps, request.info)
        with self._synchronizer.surfacing_errors(), self._timers.record("validation"):
            returned = call_with_accepted(
                operator.validate,
                stream.take(request.num_steps),
                info=dict(request.info),
                **({"num_steps": request.num_steps} if isinstance(operator, CreatorOperator) else {}),
            )
        self._running = None
        return self._answer(returned, {}, request.profile, stream.num_steps_taken - began_at)

    def progress(self) -> Progress | None:
        """How far the running epoch is; called from a second thread, so it only reads."""
        running = self._running
        if running is None:
            return None
        stream, began_at, num_steps, info = running
        loss = as_number(self.operator._latest_metrics.get("train_loss"))
        total = num_steps if num_steps is not None else stream.source.num_steps()
        return Progress(
            stream.num_steps_taken - began_at, total, info.get("epoch_idx", 0), info.get("num_epochs"), loss
        )

    def _answer(self, returned: Any, extra: dict[str, Any], profile: bool, num_steps: int) -> EpochAnswer:
        timings = {"profile": self._timers.stats()} if profile else {}
        if not isinstance(returned, Mapping):
            return EpochAnswer(None, returned, num_steps)
        values = {**extra, **{name: _plain(value) for name, value in returned.items()}, **timings}
        if isinstance(returned, MetricSummary):
            return EpochAnswer(WorkerMetrics(values, returned.totals, returned.objects), None, num_steps)
        return EpochAnswer(WorkerMetrics(values), None, num_steps)

    def _arm_timers(self, profile: bool) -> None:
        if profile:
            self._timers.reset()
            self._timers.enable()
        else:
            self._timers.disable()
        self.operator.timers = self._timers

    # ------------------------------------------------------------------------------------------------ going on

    def completed(self) -> Completed:
        """How far this replica came: what another group of any size has to go on from. Survivors of a loss know it."""
        stream = self._train_stream
        if stream is None:
            return Completed(self.epoch, 0, self.operator.global_step)
        is_inside = stream.is_mid_pass or stream.completed < stream.consumed
        return Completed(self.epoch, stream.completed if is_inside else 0, self.operator.global_step)

    def rejoin(self, world: World) -> None:
        """Goes on as a member of another group, which all its ranks have joined already.

        The next batch is the one after what this replica has completed, divided anew; a dataset that is shuffled in
        each pass begins a fresh one. The caller gives all ranks the state of one that came furthest (`restore`).
        """
        position = self._position_after(self.completed())
        self._world = world
        self._synchronizer.rejoin(world)
        self._train_stream = self._validation_stream = self._running = self._agreement = None
        self._resume = {"position": position}

    def _position_after(self, completed: Completed) -> dict[str, Any] | None:
        stream = self._train_stream
        if stream is None or not isinstance(stream.source, DividedSource):
            return None
        return {"pass_index": stream.pass_index, "consumed": completed.num_samples, "seed": self._spec.seed}

    # ------------------------------------------------------------------------------------------------ data

    def _training_stream(self) -> BatchStream:
        if self._train_stream is None:
            source = self._source(self.operator.train_dataset, "train_dataset", training=True)
            self._train_stream = BatchStream(source, self._synchronizer.step, self._begin_pass, self._undo)
            self._resume_position(self._train_stream)
        return self._train_stream

    def _begin_pass(self) -> int:
        self.epoch += 1
        return self.epoch - 1

    def _source(self, dataset: Any, name: str, *, training: bool) -> Source:
        if dataset is None:
            return _Missing(name)
        if datasets.is_divided(dataset):
            passes = self._passes.setdefault(name, Passes(dataset))
            return DividedSource(passes, self.operator._sharding, self._world, pads=training)
        if training and self._world.is_distributed:
            self._agreement = self._agreement or Agreement()
            return OwnSource(dataset, self._agreement)
        return OwnSource(dataset, None)

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
        """Where in the data the next batch is, for a dataset that is divided."""
        stream = self._train_stream
        if stream is None:
            return dict(self._resume["position"]) if self._resume and self._resume.get("position") else None
        if not isinstance(stream.source, DividedSource):
            return None
        consumed = stream.consumed if stream.is_mid_pass else 0
        return {"pass_index": stream.pass_index, "consumed": consumed, "seed": self._spec.seed}

    def _resume_position(self, stream: BatchStream) -> None:
        resume, self._resume = self._resume, None
        position = (resume or {}).get("position")
        if not position or not isinstance(stream.source, DividedSource):
            return
        num_passes = position["pass_index"] + (0 if position["consumed"] else 1)
        is_same_order = position["seed"] == self._spec.seed and stream.source.go_to_pass(num_passes)
        if not position["consumed"]:
            return
        if is_same_order or not stream.source.is_shuffled:
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
            "models": [[_array(variable) for variable in registry.weights_of(model)] for model in operator._models],
            "optimizers": [
                [_array(variable) for variable in registry.variables_of_optimizer(optimizer)]
                for optimizer in operator._optimizers
            ],
            RESUME: {"global_step": operator.global_step, "position": self._position()},
        }

    def _targets(self, state: Mapping[str, Any]) -> list[tuple[list[Any], Sequence[Any], str]]:
        operator = self.operator
        targets = [
            (registry.weights_of(model), values, f"model {index}")
            for index, (model, values) in enumerate(zip(operator._models, state["models"], strict=True))
        ]
        targets += [
            (registry.variables_of_optimizer(optimizer), values, f"optimizer {index}")
            for index, (optimizer, values) in enumerate(zip(operator._optimizers, state["optimizers"], strict=True))
        ]
        return targets

    def _weights(self) -> list[Any]:
        return [variable for model in self.operator._models for variable in registry.weights_of(model)]

    def _seeds(self) -> list[Any]:
        """What layers of Keras 3 draw random numbers from: variables of models that are no weights."""
        known = {id(variable) for variable in self._weights()}
        return [
            variable
            for model in self.operator._models
            if model.built and not registry.is_legacy(model)
            for variable in model.non_trainable_variables
            if id(variable) not in known
        ]

    def architecture(self) -> list[str]:
        """The registered models without their weights, as JSON."""
        return [_serialized(model) for model in self.operator._models]

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

    random.seed(seed)
    np.random.seed(seed % 2**32)
    tf.random.set_seed(seed)


def _try_to_build(model: Any, element_spec: Any) -> None:
    try:
        registry.build_model(model, element_spec)
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
    if shapes:
        raise ValueError(f"The state of {what} does not fit what is registered, nothing was loaded. Shapes: {shapes}.")


def _serialized(model: Any) -> str:
    name = "tf_keras" if registry.is_legacy(model) else "keras"
    keras = importlib.import_module(name)
    return json.dumps({"keras": name, "model": keras.saving.serialize_keras_object(model)})
