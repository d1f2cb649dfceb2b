"""Loaders as the data of one replica: which source is for which loader, and the order that all ranks must share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch

from raysgd.arrays.ray_batches import RayLoader, RayShare
from raysgd.arrays.whole_data import DealtBatches, WholeShare
from raysgd.engine.shared.types import DataLedger, World
from raysgd.exceptions import NoDataError
from raysgd.messages.epochs import EpochRequest
from raysgd.streams.source import StreamData, StreamSource, stream_data
from raysgd.streams.stream import Stream
from raysgd.torch.data import call_data
from raysgd.torch.data.batch_sampler import GlobalBatchRule
from raysgd.torch.data.batch_streams import (
    DividedBatchesSource,
    DividedLoaderSource,
    DrawnItem,
    LoaderOncePerCall,
    LoaderSource,
    LockstepSource,
    PlainSource,
    TorchBatchStream,
)
from raysgd.torch.data.batches import TensorCollate
from raysgd.torch.data.ray_tensors import as_batch
from raysgd.torch.data.sampling import ShardedLoader, UndividedLoader
from raysgd.torch.parallel.ranks import Ranks
from raysgd.torch.parallel.step import BatchStep
from raysgd.torch.parallel.strategy import NoParallel
from raysgd.worker.data import feed
from raysgd.worker.data.batch_streams import NO_BATCH
from raysgd.worker.data.feed import has_divided_source

logger = logging.getLogger(__name__)


class TorchFeed(feed.Feed):
    """Hands out the streams over loaders.

    Args:
        data_of: What is registered under "train" or "validation".
        parallel: How the replicas are kept equal.
        world_size: How many replicas there are.
        undo: Called ahead of a batch of padding in training; returns what undoes what must not stay of it.
        rank: The place among them.
        rule: How loaders are divided by global batches; None where the size of a worker's batch is given.
        balance: Whether shares follow the speed of the ranks.
    """

    def __init__(
        self,
        data_of: Callable[[str], ShardedLoader | UndividedLoader | StreamData | None],
        parallel: NoParallel,
        world_size: int,
        undo: Callable[[], Callable[[], None]] | None = None,
        rank: int = 0,
        rule: GlobalBatchRule | None = None,
        balance: bool = False,
    ) -> None:
        super().__init__()
        self._data_of = data_of
        self._parallel = parallel
        self._rule = rule
        self._group = Ranks(parallel, rank, world_size, balance)
        self._undo = undo

    @property
    def _ranks(self) -> Ranks:
        return self._group

    @property
    def _registered_stream(self) -> StreamData | None:
        data = self._data_of("train")
        return data if isinstance(data, StreamData) else None

    def _stream_over(self, source: LoaderSource, begin_pass: Callable[[], int]) -> TorchBatchStream:
        return TorchBatchStream(source, self._parallel.step, begin_pass, self._undo)

    def _source_of_call(self, name: str, request: EpochRequest, *, training: bool) -> LoaderSource:
        share, ranks = self.data_of_call[name], self._ranks
        data: Any = _CallBatches(share)
        if isinstance(share, WholeShare):
            loader = self.made_of_call(name, request)
            if isinstance(loader, Stream):
                assert self._rule is not None, "checked in the driver"
                made = stream_data(loader, name, self._rule.of_streams, ranks.world_size)
                return self._stream_source(made, request.seed)
            data = call_data.divided(loader, World(ranks.rank, ranks.world_size), training, self._rule)
            if isinstance(data, ShardedLoader):
                dealt = DealtBatches(loader, World(ranks.rank, ranks.world_size))
                return _divided_source(data, call_data.seed_of(loader, request.seed), dealt)
        return self._plain_source(data, lockstep=True) if training else LoaderOncePerCall(data)

    def _make(self, name: str) -> Any:
        data = self.data_of_call[name].data
        return data.make(self.collate_fn(name)) if isinstance(data, call_data.DatasetLoader) else data.make()

    def collate_fn(self, name: str) -> Any:
        """Returns the `collate_fn` of the loader under "train" or "validation", or else of the other one."""
        other = "train" if name == "validation" else "validation"
        return call_data.collate_fn_of(getattr(self._data_of(each), "loader", None) for each in (name, other))

    def ray_loader(self, name: str) -> RayLoader | None:
        loader = getattr(self._data_of(name), "loader", None)
        return loader if isinstance(loader, RayLoader) else None

    def _open_validation(self, request: EpochRequest) -> TorchBatchStream:
        return TorchBatchStream(self._validation_source(request), _EvaluationStep(self._parallel), lambda: 0)

    def _validation_source(self, request: EpochRequest) -> LoaderSource:
        if request.shard_key is not None:
            return self._source_of_call("validation", request, training=False)
        loader = self.ray_loader("validation")
        return LoaderOncePerCall(loader) if loader is not None else self._source("validation", request, training=False)

    def _source(self, name: str, request: EpochRequest, *, training: bool) -> LoaderSource:
        data = self._data_of(name)
        if data is None:
            return PlainSource(_MissingLoader(name))
        if isinstance(data, ShardedLoader):
            return _divided_source(data, request.seed, data.given)
        if isinstance(data, StreamData):
            return self._stream_source(data, request.seed)
        return self._plain_source(data.loader, lockstep=training)

    def _stream_source(self, data: StreamData, seed: int) -> StreamSource:
        return StreamSource(data, self._ranks, seed, TensorCollate(), DrawnItem, NO_BATCH)

    def _plain_source(self, loader: Any, lockstep: bool) -> LoaderSource:
        if lockstep and self._parallel.synchronizes:
            return LockstepSource(loader)
        return PlainSource(loader)

    def take_place(self, rank: int, size: int, batch_size: int | None, instead_of: int | None) -> None:
        """Divides the data again, for a place in a group of another size.

        Args:
            rank: The place.
            size: The size.
            batch_size: How many samples of a global batch are this worker's share from now on; None if unknown.
            instead_of: How many were; loaders with another batch size keep theirs.
        """
        self._group = Ranks(self._parallel, rank, size, self._group.balance)
        self._of_call = None, None
        self.validation.drop()
        for name in ("train", "validation"):
            data = self._data_of(name)
            if isinstance(data, ShardedLoader):
                data.sampler.rule = self._rule
                data.sampler.reshape(rank, size, batch_size if data.sampler.batch_size == instead_of else None)

    def is_divided(self, stream: Any) -> bool:
        if stream is not None and stream is self._of_call[1]:
            return self.obstacle_of_call(stream) is None
        return super().is_divided(stream)

    def obstacle_of_call(self, stream: Any) -> str | None:
        if stream is not self._of_call[1] or stream is None:
            return None
        if not has_divided_source(stream):
            return "the data of this call are not divided by the library"
        source = stream.source
        if isinstance(source, DividedLoaderSource) and not source.is_repeatable:
            name = source.order.name
            return f"the order of the data of this call comes from {name}, which draws another one each time"
        return None

    def obstacle(self, name: str) -> str | None:
        data = self._data_of(name)
        if isinstance(data, UndividedLoader):
            return f"the {name} loader is not divided by the library ({data.reason})"
        is_apart = name == "train" and isinstance(data, ShardedLoader) and self.train_stream is not None
        if is_apart and not has_divided_source(self.train_stream):
            return "each worker draws its own batches with the batch sampler of the train loader"
        return None

    def ledger(self) -> DataLedger | None:
        stream = self.train_stream
        if not has_divided_source(stream):
            return None
        due, used, in_flight = stream.ledger()
        source = stream.source
        return DataLedger(stream.pass_index, due, used, in_flight, left_out=source.left_out, row_bytes=source.row_bytes)


def _divided_source(data: ShardedLoader, seed: int, plain: Any) -> DividedLoaderSource:
    if data.signature is None:
        return DividedBatchesSource(data, seed, plain)
    return DividedLoaderSource(data, seed)


class _EvaluationStep(BatchStep):
    """A step that trains nothing. Where forward passes take all ranks, the last batch is followed by those of others.

    So code behind the user's loop runs on all ranks at the same time, and may talk to other ranks.
    """

    def __init__(self, parallel: NoParallel) -> None:
        super().__init__()
        self._parallel = parallel

    def end_stream(self) -> None:
        super().end_stream()
        self._parallel.await_others()


class _MissingLoader:
    """Stands for a loader that was not registered; an error only once somebody draws from it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __iter__(self) -> Iterator[Any]:
        way_out = ", or pass `dataset` to `train`." if self._name == "train" else " before you call `validate`."
        raise NoDataError(f"`{self._name}_loader` was not registered: pass it to `register_data` in `setup`{way_out}")


class _CallBatches:
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
