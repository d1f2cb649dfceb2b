"""Provides a replica's batches: creates a batch source for each dataset, and tracks the position in the data."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from raysgd.core.arrays.division import Division
from raysgd.core.arrays.user_data import CallData, RayLoader, RepeatedBatches
from raysgd.core.connections import tensorflow as connections
from raysgd.core.engine.shared.types import World
from raysgd.exceptions import NoDataError
from raysgd.streams.source import StreamData, stream_data
from raysgd.streams.stream import Stream
from raysgd.tf.data import sources
from raysgd.tf.fit import FitStream
from raysgd.tf.objects import datasets
from raysgd.tf.parallel.keras_sync import Synchronizer
from raysgd.tf.training_operator import TrainingOperator
from raysgd.trainer.messages.epochs import EpochRequest
from raysgd.trainer.worker import feed

logger = logging.getLogger(__name__)


class TFFeed(feed.DataFeed):
    """Creates batch streams over an operator's datasets, and over data that users pass to calls such as `validate`.

    Args:
        operator_of: Returns the operator that registered the datasets.
        synchronizer: Holds the current step and the group, and takes part in steps in which this rank has no samples.
        world: This rank and the number of ranks.
        seed: Seed that determines the order of shuffled datasets.
        num_global: With "worker" sharding, how many batches of a registered dataset a step takes. Default: the number
            of workers.
    """

    looks_ahead = True

    def __init__(
        self,
        operator_of: Callable[[], TrainingOperator],
        synchronizer: Synchronizer,
        world: World,
        seed: int,
        num_global: int | None,
    ) -> None:
        super().__init__()
        self._operator_of = operator_of
        self._synchronizer = synchronizer
        self._world = world
        self._seed = seed
        self._num_global = num_global
        self._passes: dict[str, sources.Passes] = {}
        self._is_regrouped = False

    @property
    def _ranks(self) -> sources.TFRanks:
        return sources.TFRanks(self._world.rank, self._world.size, self._synchronizer.group)

    @property
    def _registered_stream(self) -> StreamData | None:
        return self._operator_of()._raysgd.data.streams.get("train")

    @property
    def fit(self) -> FitStream | None:
        """Holds the position of Keras's `fit`. None if no `fit` runs."""
        return None

    @property
    def train_passes(self) -> sources.Passes:
        """The training dataset, with the number of passes over it so far."""
        return self._passes_of("train")

    def _passes_of(self, name: str) -> sources.Passes:
        if name not in self._passes:
            self._passes[name] = sources.Passes(getattr(self._operator_of(), f"{name}_dataset"))
        return self._passes[name]

    def _source(self, name: str, request: EpochRequest, *, training: bool) -> sources.TFSource:
        operator, world = self._operator_of(), self._world
        internals = operator._raysgd
        share = None if request.shard_key is None else self.data_of_call[name]
        if share is None:
            dataset: Any = internals.data.streams.get(name) or getattr(operator, f"{name}_dataset")
        else:
            made = self.made_of_call[name]
            dataset = stream_data(made, name, Division, world.size) if isinstance(made, Stream) else made
        if isinstance(dataset, StreamData):
            return sources.source_of(dataset, self._ranks, self._seed)
        if dataset is None:
            return sources.OwnSource(RepeatedBatches(partial(_refuse_missing, f"{name}_dataset")), None)
        if (share is not None and not share.goes_to_all) or not datasets.is_divided(dataset):
            return sources.OwnSource(dataset, connections.votes() if training and world.is_distributed else None)
        sharding: datasets.Sharding = internals.data.sharding
        if share is None:
            passes, num_global = self._passes_of(name), self._num_global or world.size
        else:
            passes, num_global = sources.Passes(dataset), world.size
            if share.kind == "rows" and not internals.context.settings.batch_options.split_batches:
                sharding = "worker"
        return sources.TFDividedSource(passes, sharding, world, training, num_global, self._seed)

    def _make(self, name: str, share: CallData) -> Any:
        return sources.batches_of(share, self._world.is_distributed)

    def ray_loader(self, name: str) -> RayLoader | None:
        return self._operator_of()._raysgd.data.ray_loaders.get(name)

    def take_rank(self, world: World) -> None:
        """Reshard the remaining data of the pass after this replica has joined another group.

        Args:
            world: The replica's rank and the number of ranks in the new group.
        """
        self.go_to(self.epoch, self.position())
        self._world = world
        self._is_regrouped = True

    def align_validation(self) -> None:
        """Reset a shuffled validation dataset to the order of its first pass, if its order may differ between ranks.

        The order differs if a worker has been replaced, because the new worker starts with the first order. It may also
        differ if the training dataset contains the same shuffle. Each pass over the training dataset then changes the
        order of the validation dataset, too, and the ranks may have made different numbers of such passes.

        If the dataset cannot be copied, its order stays unchanged, and a warning is logged.
        """
        internals = self._operator_of()._raysgd
        data, is_regrouped, self._is_regrouped = internals.data, self._is_regrouped, False
        dataset, trained = data.validation_dataset, data.train_dataset
        if dataset is None or not datasets.is_divided(dataset):
            return
        if not is_regrouped and (trained is None or not datasets.share_a_shuffle(dataset, trained)):
            return
        passes = self._passes_of("validation")
        passes.begin_pass()
        if passes.go_to(0):
            internals.data = replace(data, validation_dataset=passes.dataset)
        else:
            logger.warning(datasets.NO_FIRST_ORDER)

    def obstacle(self, name: str) -> str | None:
        dataset = getattr(self._operator_of(), f"{name}_dataset")
        if dataset is None or datasets.is_divided(dataset):
            return None
        if self.ray_loader(name) is not None:
            return f"Ray Data shards the {name} dataset, and stores no position"
        known_as = {"validation": "test"}.get(name, name)
        return f"the {known_as} dataset is not sharded by the library (its auto-shard policy is OFF)"

    @property
    def _is_mid_pass(self) -> bool:
        return bool((self.position() or {}).get("is_mid_pass"))

    @property
    def order_obstacle(self) -> str | None:
        if self._is_mid_pass and not self.train_passes.can_repeat():
            return "the train dataset is shuffled, and too large for a copy that repeats the order of this pass"
        return None


class FitFeed(TFFeed):
    """The data of an operator that calls Keras's `fit`, which draws the batches itself."""

    @cached_property
    def fit(self) -> FitStream:
        return FitStream(self.train_passes, self._synchronizer.exchanges)

    def training(self, request: EpochRequest, *, is_begun: bool = False) -> FitStream:
        return self.fit

    def pass_index(self, cursor: Any) -> int:
        return self.fit.pass_index if self._is_mid_pass else self.epoch

    @property
    def _is_mid_pass(self) -> bool:
        return self.fit.is_mid_pass

    def is_divided(self, cursor: Any) -> bool:
        return True

    def break_off(self) -> None:
        self.fit.break_off()
        self._synchronizer.undo.undo_step()

    def progress_text(self) -> str:
        place = self.fit.state()
        return f"epoch {place['epoch']} of `fit`, {place['num_steps']} steps taken" if "epoch" in place else ""


def _refuse_missing(name: str) -> Iterator[Any]:
    """Raise an error when a batch is drawn from a dataset that was not registered."""
    raise NoDataError(f"`{name}` was not registered: pass it to `register_data` in `setup`.")
