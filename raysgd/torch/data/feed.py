"""Loaders as the data of one replica: which source is for which loader, and the order that all ranks must share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils.data import default_collate

from raysgd.arrays.ray_batches import RayLoader, RayShare
from raysgd.arrays.whole_data import WholeShare
from raysgd.engine.shared.types import DataLedger, World
from raysgd.exceptions import NoDataError
from raysgd.messages.epochs import EpochRequest
from raysgd.streams.data import StreamData
from raysgd.streams.lane_ends import Numbers, alone
from raysgd.streams.source import StreamSource
from raysgd.torch.data import call_data
from raysgd.torch.data.balancing import Balancing
from raysgd.torch.data.batch_sampler import ElasticBatchSampler, JointBatches
from raysgd.torch.data.ray_tensors import as_batch
from raysgd.torch.data.sample_order import SamplerOrder
from raysgd.torch.data.sampling import ShardedLoader, UndividedLoader
from raysgd.torch.data.streams import (
    Agreement,
    DividedLoaderSource,
    DrawnItem,
    LoaderOncePerCall,
    LoaderSource,
    LockstepSource,
    PlainSource,
    TorchBatchStream,
)
from raysgd.torch.parallel.step import BatchStep
from raysgd.torch.parallel.strategy import NoParallel, Summation
from raysgd.worker.data import feed
from raysgd.worker.data.streams import NO_BATCH

logger = logging.getLogger(__name__)


class TorchFeed(feed.Feed):
    """Hands out the streams over loaders.

    Args:
        data_of: What is registered under "train" or "validation".
        parallel: How the replicas are kept equal.
        world_size: How many replicas there are.
        undo: Called ahead of a batch of padding in training; returns what undoes what must not stay of it.
        rank: The place among them.
        joint: How loaders are divided by joint batches; None where the size of a worker's batch is given.
        balance: Whether shares follow the speed of the ranks.
    """

    divided_source = DividedLoaderSource, StreamSource

    def __init__(
        self,
        data_of: Callable[[str], ShardedLoader | UndividedLoader | StreamData | None],
        parallel: NoParallel,
        world_size: int,
        undo: Callable[[], Callable[[], None]] | None = None,
        rank: int = 0,
        joint: JointBatches | None = None,
        balance: bool = False,
    ) -> None:
        super().__init__()
        self._rank = rank
        self._joint = joint
        self._balance = balance
        self._data_of = data_of
        self._parallel = parallel
        self._world_size = world_size
        self._undo = undo
        self._agreement: Agreement | None = None
        self._summation: Summation | None = None
        self._order_before: int | None = None

    def training(self, request: EpochRequest) -> TorchBatchStream:
        stream: TorchBatchStream = super().training(request)
        if stream is self.train_stream and isinstance(stream.source, DividedLoaderSource):
            self._prepare_check(stream.source)
            self._prepare_counts(stream.source)
        elif isinstance(stream.source, StreamSource):
            self._prepare_lanes(stream.source)
        return stream

    def _prepare_lanes(self, source: StreamSource) -> None:
        """Lets ranks tell each other what they see of their lanes, where nothing else says it."""
        source.start_sum = alone
        if self._world_size > 1 and not source.is_known:
            if not self._parallel.synchronizes:
                raise ValueError(
                    'With `parallel="none"` workers tell each other nothing, which a stream with a filter, or with '
                    "shards of unknown lengths, needs."
                )
            source.start_sum = partial(_sum_of_numbers, self._start_sum())

    def _prepare_counts(self, source: DividedLoaderSource) -> None:
        """Lets the shares of a source follow the speed of the ranks, or else the samples that collators return."""
        if self._world_size == 1 or not self._parallel.synchronizes or source.num_shards:
            return
        if not self._balance:
            source.agreement = Agreement(self._start_sum()) if source.has_own_collator else None
        elif self._joint is not None and source.balancing is None:
            balancing = Balancing(self._rank, self._world_size, self._parallel.exchanges.own_s, self._start_sum())
            source.follow(balancing)

    def _open_call(self, request: EpochRequest) -> TorchBatchStream:
        source = self._source_of_call("train", request, training=True)
        stream = TorchBatchStream(source, self._parallel.step, lambda: self.epoch - 1, self._undo)
        self._go_to_place(stream, self.data_of_call.get("train"))
        return stream

    def _source_of_call(self, name: str, request: EpochRequest, training: bool) -> LoaderSource:
        """Return where the batches of data of a call come from."""
        share = self.data_of_call[name]
        data: Any = _DataOfCall(share)
        if isinstance(share, WholeShare):
            loader = self.made_of_call(name, request)
            data = call_data.divided(loader, World(self._rank, self._world_size), training, self._joint)
            if isinstance(data, ShardedLoader):
                source = DividedLoaderSource(data, call_data.seed_of(loader, request.seed))
                if training:
                    self._prepare_counts(source)
                return source
        return self._plain_source(data, lockstep=True) if training else LoaderOncePerCall(data)

    def _make(self, name: str) -> Any:
        data = self.data_of_call[name].data
        return data.make(self.collate_fn(name)) if isinstance(data, call_data.DatasetLoader) else data.make()

    def collate_fn(self, name: str) -> Any:
        """What makes a batch of samples in the loader under "train" or "validation", or else in the other one."""
        other = "train" if name == "validation" else "validation"
        return call_data.collate_fn_of(getattr(self._data_of(each), "loader", None) for each in (name, other))

    def _go_to_place(self, stream: TorchBatchStream, share: Any) -> None:
        """Goes on where the last call with the same data stopped, if the workers were given them again."""
        place, source = getattr(share, "place", None), stream.source
        if place is None or not isinstance(source, DividedLoaderSource):
            return
        self.data_of_call["train"] = replace(share, place=None)
        if place.consumed < source.num_samples:
            stream.resume(place.pass_index, place.consumed)

    def ray_loader(self, name: str) -> RayLoader | None:
        loader = getattr(self._data_of(name), "loader", None)
        return loader if isinstance(loader, RayLoader) else None

    def _open_training(self, request: EpochRequest) -> TorchBatchStream:
        source = self._source("train", request.seed, lockstep=True)
        return TorchBatchStream(source, self._parallel.step, self.begin_pass, self._undo)

    def _open_validation(self, request: EpochRequest) -> TorchBatchStream:
        return TorchBatchStream(self._validation_source(request), _StepOfEvaluation(self._parallel), lambda: 0)

    def _validation_source(self, request: EpochRequest) -> LoaderSource:
        if request.shard_key is not None:
            return self._source_of_call("validation", request, training=False)
        loader = self.ray_loader("validation")
        return (
            LoaderOncePerCall(loader)
            if loader is not None
            else self._source("validation", request.seed, lockstep=False)
        )

    def _source(self, name: str, seed: int, *, lockstep: bool) -> LoaderSource:
        data = self._data_of(name)
        if data is None:
            return PlainSource(_Missing(name))
        if isinstance(data, ShardedLoader):
            return DividedLoaderSource(data, seed)
        if isinstance(data, StreamData):
            return StreamSource(data, seed, default_collate, DrawnItem, NO_BATCH)
        return self._plain_source(data.loader, lockstep)

    def _plain_source(self, loader: Any, lockstep: bool) -> LoaderSource:
        if lockstep and self._parallel.synchronizes:
            self._agreement = self._agreement or Agreement(self._start_sum())
            return LockstepSource(loader, self._world_size, self._agreement)
        return PlainSource(loader)

    def _start_sum(self) -> Summation:
        """Made once in each group, by all ranks at the same time."""
        self._summation = self._summation or self._parallel.summation()
        return self._summation

    def _prepare_check(self, source: DividedLoaderSource) -> None:
        """Sees to it that a user's sampler draws the same on all ranks, and after a resumption what it drew before."""
        data = self._data_of("train")
        assert isinstance(data, ShardedLoader)
        if not isinstance(data.sampler.order, SamplerOrder):
            return
        is_joint = self._parallel.synchronizes and self._world_size > 1
        start_sum = self._start_sum() if is_joint else None
        source.check_order = partial(self._check_order, data.sampler, start_sum)

    def _check_order(self, sampler: ElasticBatchSampler, start_sum: Summation | None) -> None:
        own, before = sampler.fingerprint(), self._order_before
        self._order_before = None
        assert own is not None, "only a rank's own order is checked"
        if start_sum is not None:
            numbers = torch.tensor([own])
            start_sum(numbers)()
            if numbers.item() != own * self._world_size:
                raise ValueError(
                    f"The workers' {sampler.order.name} drew different orders. The library divides one order of all "
                    "samples, which the sampler has to draw alike on every worker: from generators of torch, numpy or "
                    "`random`, or from what `set_epoch` told it, and from nothing that it counts by itself or that "
                    "depends on the rank. If it divides the data itself, pass `add_dist_sampler=False`."
                )
        if before not in (None, own):
            logger.warning(
                "the train data's %s draws another order than in the epoch that is resumed: some samples are "
                "repeated, others are skipped",
                sampler.order.name,
            )

    def take_place(self, rank: int, size: int, batch_size: int | None, instead_of: int | None) -> None:
        """Divides the data again, for a place in a group of another size.

        Args:
            rank: The place.
            size: The size.
            batch_size: How many samples of a joint batch are this worker's share from now on; None if unknown.
            instead_of: How many were; loaders with another batch size keep theirs.
        """
        self._rank, self._world_size = rank, size
        self._summation = None
        if self.train_stream is not None and isinstance(self.train_stream.source, DividedLoaderSource):
            self.train_stream.source.balancing = None  # what was measured belongs to the former group
        self._of_call = None, None
        self.validation.drop()
        for name in ("train", "validation"):
            data = self._data_of(name)
            if isinstance(data, StreamData):
                data.rank, data.world_size = rank, size
            elif isinstance(data, ShardedLoader):
                data.sampler.joint = self._joint
                data.sampler.reshape(rank, size, batch_size if data.sampler.batch_size == instead_of else None)

    def obstacle(self, name: str) -> str | None:
        data = self._data_of(name)
        if data is None or isinstance(data, ShardedLoader | StreamData):
            return None
        return f"the {name} loader is not divided by the library ({data.reason})"

    def ledger(self) -> DataLedger | None:
        stream = self.train_stream
        if stream is None or not isinstance(stream.source, self.divided_source):
            return None
        return DataLedger(stream.pass_index, *stream.ledger())

    def _origin(self, stream: TorchBatchStream) -> dict[str, Any]:
        if isinstance(stream.source, StreamSource):
            return stream.source.state(stream.completed if stream.is_mid_pass else 0)
        data = self._data_of("train")
        assert isinstance(data, ShardedLoader)
        origin = {"seed": stream.source.seed, "num_samples": data.num_samples}
        order = self._order_before or data.sampler.fingerprint() if stream.is_mid_pass else None
        return origin if order is None else {**origin, "order": order}

    def go_to(self, epoch: int, position: Mapping[str, Any] | None) -> None:
        super().go_to(epoch, position)
        self._order_before = None

    def _go_to_position(self, stream: TorchBatchStream, position: Mapping[str, Any]) -> None:
        if isinstance(stream.source, StreamSource):
            stream.source.load_state(position["consumed"], position)
            if position["is_mid_pass"]:
                stream.resume(position["pass_index"], position["consumed"])
            return
        data = self._data_of("train")
        assert isinstance(data, ShardedLoader)
        if position["num_samples"] != data.num_samples:
            logger.warning("the size of the train data has changed since the state was saved: starting a new epoch")
            return
        stream.source.seed = position["seed"]
        if position["is_mid_pass"]:
            stream.resume(position["pass_index"], position["consumed"])
            self._order_before = position.get("order")


class _StepOfEvaluation(BatchStep):
    """A step that trains nothing. Where forward passes take all ranks, the last batch is followed by those of others.

    So code behind the user's loop runs on all ranks at the same time, and may talk to other ranks.
    """

    def __init__(self, parallel: NoParallel) -> None:
        super().__init__()
        self._parallel = parallel

    def end_stream(self) -> None:
        super().end_stream()
        self._parallel.await_others()


def _sum_of_numbers(start_sum: Summation, numbers: Numbers) -> Callable[[], Numbers]:
    """Begins to add up arrays of NumPy over all ranks, beside the training; returns what waits for the sums."""
    tensor = torch.from_numpy(numbers)
    wait = start_sum(tensor)

    def summed() -> Numbers:
        wait()
        return numbers

    return summed


class _Missing:
    """Stands for a loader that was not registered; an error only once somebody draws from it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __iter__(self) -> Iterator[Any]:
        way_out = ", or pass `dataset` to `train`." if self._name == "train" else " before you call `validate`."
        raise NoDataError(f"`{self._name}_loader` was not registered: pass it to `register_data` in `setup`{way_out}")


class _DataOfCall:
    """Batches of a dataset that a call brought along. Lists of tuples of tensors become one tensor for each place."""

    def __init__(self, shard: Any) -> None:
        self._shard = shard

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self._shard, RayShare):
            return (as_batch(arrays, self._shard.form) for arrays in self._shard.arrays())
        return map(_in_tensors, self._shard)


def _in_tensors(batch: Any) -> Any:
    if isinstance(batch, list) and batch and isinstance(batch[0], tuple):
        return tuple(_joined(list(parts)) for parts in zip(*batch, strict=True))
    return batch


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    tensors = [torch.as_tensor(part) for part in parts]
    return torch.stack(tensors) if tensors[0].ndim == 0 else torch.cat(tensors)
