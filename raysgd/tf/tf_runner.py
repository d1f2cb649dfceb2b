"""`TFRunner`: the replica in each worker. It owns the operator and what belongs to it.

Internal: what the class of this name in the old library could do is done by `TFTrainer`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from raysgd.connections import tensorflow as connections
from raysgd.engine.time_spent import DRIVER
from raysgd.engine.types import World
from raysgd.exceptions import IncompatibleModelError
from raysgd.replicas.epoch_run import EpochRun
from raysgd.replicas.epochs import EpochAnswer, EpochRequest
from raysgd.replicas.facts import RunnerFacts
from raysgd.replicas.operator import take_place
from raysgd.replicas.prediction import PredictRequest, Work
from raysgd.replicas.ray_batches import ray_batches_of
from raysgd.replicas.runner import ClassRunner
from raysgd.tf import building, datasets, learning_rates, predicting, registration, rng, serializing, shared_variables
from raysgd.tf.creator_operator import CreatorOperator
from raysgd.tf.datasets import DatasetSignature
from raysgd.tf.feed import Feed
from raysgd.tf.keras_sync import Synchronizer
from raysgd.tf.loops import FitLoop, OperatorLoop
from raysgd.tf.operator_context import OperatorContext
from raysgd.tf.replica_state import KerasState
from raysgd.tf.settings import TFSettings
from raysgd.tf.training_operator import TrainingOperator
from raysgd.utils import BATCH_SIZE

logger = logging.getLogger(__name__)


class TFRunner(ClassRunner):
    """Hosts one operator."""

    stock_train_epochs = (TrainingOperator.train_epoch, CreatorOperator.train_epoch)
    _feed: Feed
    _loop: OperatorLoop
    _state: KerasState

    def __init__(self, settings: TFSettings, world: World) -> None:
        self._settings = settings
        self._num_workers = settings.num_workers or world.size
        self._strategy = connections.strategy()
        counts_steps = self._num_workers > 1 or settings.snapshot_every_n_steps is not None
        self._synchronizer = Synchronizer(world, counts_steps) if self._strategy is None else Synchronizer(World(0, 1))
        # With a batch size of all workers together a step is the same for any number of them.
        num_joint = self._num_workers if BATCH_SIZE in settings.config else None
        feed = Feed(lambda: self.operator, self._synchronizer, world, settings.seed, num_joint)
        super().__init__(world, settings.snapshot_every_n_steps, feed)

    @property
    def operator(self) -> TrainingOperator:
        """The live operator."""
        assert self._operator is not None
        operator: TrainingOperator = self._operator
        return operator

    def setup(self) -> RunnerFacts:
        """Builds the operator, which runs the user's `setup`, and gives all ranks rank 0's weights."""
        settings, world = self._settings, self._world
        makes_fit = issubclass(settings.training_operator_cls, CreatorOperator)
        if self._strategy is not None and not makes_fit:
            raise IncompatibleModelError(
                '`backend="mwms"` trains compiled models of creator functions, with `fit`. For an operator class use '
                '`backend="gloo"`.'
            )
        rng.seed_alike(settings.seed)
        context = OperatorContext(settings, world, self._synchronizer, self._strategy)
        config = dict(settings.config) if makes_fit else settings.config_for(self._num_workers)
        self._operator = operator = settings.training_operator_cls(config, context)
        obstacle = self._feed.obstacle("train")
        if settings.batch_options.is_constant and obstacle is not None:
            way_out = "Omit it, or register a dataset that the library divides"
            raise ValueError(f'`joint_batch="constant"` cannot work: {obstacle}. {way_out}.')
        self._loop = self._loop_of(operator)
        self._state = KerasState(operator, self._feed, self._loop, is_joint=self._strategy is not None)
        self._synchronizer.restrict_to(lambda: operator._models)
        building.check_batches(operator)
        building.build(operator, makes_fit, self._strategy is None, self._synchronizer)
        weights = [v for model in operator._models for v in registration.weights_of(model)]
        shared_variables.share_first(self._synchronizer.group, weights)
        for model in operator._models:
            registration.take_weights_in(model)
        rng.part_ways(settings.seed, world.rank, operator._models)
        operator._raysgd.chosen_rates = learning_rates.read(operator._optimizers)
        self._ledger.enter(DRIVER)
        return self._facts()

    def _edited_by(self, candidate: TFRunner) -> learning_rates.Rates:
        mine, other = self.operator, candidate.operator
        chosen = zip(mine._raysgd.chosen_rates, other._raysgd.chosen_rates, strict=True)
        present = learning_rates.read(mine._optimizers)  # of tf_keras these are no part of the state
        wanted = [rate if new == old else new for (old, new), rate in zip(chosen, present, strict=True)]
        return learning_rates.differing(learning_rates.read(other._optimizers), wanted)

    def _take_edited(self, edited: learning_rates.Rates) -> None:
        if edited:
            learning_rates.apply(edited, self.operator._optimizers)

    def follow_config(self) -> None:
        """Gives the optimizers the learning rates of `setup` again, after a state of another config was loaded."""
        learning_rates.apply(self.operator._raysgd.chosen_rates, self.operator._optimizers)

    def renew(self, settings: TFSettings) -> RunnerFacts:
        self.shutdown()
        TFRunner.__init__(self, settings, self._world)
        return self.setup()

    def _loop_of(self, operator: TrainingOperator) -> OperatorLoop:
        if not isinstance(operator, CreatorOperator):
            return OperatorLoop(operator, self._synchronizer, self._feed)
        loop = FitLoop(operator, self._synchronizer, self._feed)
        operator._raysgd.fit = loop.fit
        return loop

    def _facts(self) -> RunnerFacts:
        operator = self.operator
        return RunnerFacts(
            num_models=len(operator._models),
            num_optimizers=len(operator._optimizers),
            train_data=self._signature(operator.train_dataset),
            validation_data=self._signature(operator.validation_dataset),
            keeps_own_state=type(operator).state_dict is not TrainingOperator.state_dict,
            epoch_obstacle=self._epoch_obstacle,
            ray_batches={} if self._world.rank else ray_batches_of(operator._raysgd.data.ray_loaders),
            has_validation=operator.validation_dataset is not None,
        )

    def _signature(self, dataset: Any) -> DatasetSignature | None:
        return datasets.signature_of(dataset) if dataset is not None and datasets.is_divided(dataset) else None

    def restore_former(self, state: Mapping[str, Any]) -> str:
        """Takes over a file of the old library: the weights, the epoch, and what is known of the optimizer's variables.

        Returns:
            Why the optimizer was left as it is; nothing if it was not.

        Raises:
            ValueError: The weights do not fit the model that is registered; nothing was changed.
        """
        whole, obstacle = self._state.from_former(state)
        self.restore(whole, None)
        return obstacle

    @property
    def _connection_obstacle(self) -> str | None:
        if self._strategy is not None:
            return "a process can be in one `MultiWorkerMirroredStrategy` only"
        return None

    @property
    def _epoch_obstacle(self) -> str | None:
        return super()._epoch_obstacle or self._group_obstacle

    def warm_up(self) -> None:
        """Takes steps on zeros. What they change is taken over from another rank later, or put back."""
        self._ledger.stand_by()
        operator = self.operator
        if not operator.warms_up_standby or self._epoch_obstacle is not None or operator.train_dataset is None:
            return
        self._synchronizer.rejoin(World(0, 1))  # no other rank is here yet
        try:
            with self._synchronizer.exchanges.surfacing_errors(), self._loop.scaling_losses():
                operator.warm_up()
        except Exception as error:  # in a real step the user would get the exception
            logger.warning("warm-up of a standby worker failed: %r", error)

    def _take_place(self, world: World) -> None:
        self._feed.take_place(world)
        self._synchronizer.rejoin(world)
        self._synchronizer.exchanges.forget_call()  # the ranks are compared, and some of them are new
        take_place(self.operator, world)

    def _send(self, state: Any, takers: Sequence[int]) -> None:
        self._synchronizer.group.send(state, takers)

    def _receive(self, source: int, takers: Sequence[int]) -> Any:
        return self._synchronizer.group.receive(source, takers)

    @contextmanager
    def _training(self, run: EpochRun, stream: Any) -> Iterator[None]:
        synchronizer = self._synchronizer
        synchronizer.exchanges.ledger = self._ledger
        with synchronizer.exchanges.surfacing_errors(), synchronizer.exchanges.measuring(), self._loop.scaling_losses():
            try:
                yield
            finally:
                synchronizer.step.forget()
            shared_variables.merge_statistics(synchronizer.group, self.operator._models)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        with self._synchronizer.exchanges.surfacing_errors(), self._loop.scaling_losses():
            try:
                yield
            finally:
                self._synchronizer.validation_step.forget()

    def validate(self, request: EpochRequest, share: Any = None) -> EpochAnswer:
        """Runs the operator's `validate` once; `evaluate` of Keras finds data of a call in the place of the others."""
        if request.shard_key is None or not isinstance(self.operator, CreatorOperator):
            return super().validate(request, share)
        internals = self.operator._raysgd
        registered = internals.data
        self._feed.take_share("validation", request, share)
        dataset = self._feed.made_of_call("validation", request)
        internals.data = replace(registered, validation_dataset=dataset)
        try:
            return super().validate(replace(request, shard_key=None, starts_over=True))
        finally:
            internals.data = registered

    @contextmanager
    def _predicting(self) -> Iterator[None]:
        """Random states are given back, so that training goes on as if nothing had happened."""
        with self._synchronizer.exchanges.surfacing_errors(), self._giving_back_random_numbers():
            yield

    @contextmanager
    def _giving_back_random_numbers(self) -> Iterator[None]:
        own, drawn = self._state.own(), rng.capture()
        try:
            yield
        finally:
            self._state.restore_own(own)
            rng.restore(drawn)

    def _to_predict(self, request: PredictRequest, work: Work, share: Any) -> Iterator[tuple[Any, int]]:
        return predicting.batches(work)

    def _as_array(self, value: Any) -> Any:
        return predicting.plain(value)

    def architecture(self) -> list[str]:
        """The registered models without their weights, as JSON; a single one with what it can be compiled with."""
        operator = self.operator
        registered = operator._raysgd.registered
        models, loss = registered.models, registered.loss
        if len(models) != 1 or len(registered.optimizers) != 1 or loss is None:
            return [serializing.model_to_json(model) for model in models]
        return [serializing.model_to_json(models[0], registered.optimizers[0], loss, registered.metrics)]

    def input_spec(self) -> Any:
        """What the train dataset yields."""
        return self.operator.train_dataset.element_spec
