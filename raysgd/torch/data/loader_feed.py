"""`TorchFeed`: opens one worker's data loaders as cursors, for calls to `train` and `validate`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from raysgd.core.arrays.data_kinds import RepeatedBatches
from raysgd.core.arrays.ray_batches import RayLoader
from raysgd.core.engine.shared.types import SamplesUsed
from raysgd.exceptions import NoDataError
from raysgd.streams.source import StreamData, StreamSource, stream_data
from raysgd.streams.stream import Stream
from raysgd.torch.data import call_data
from raysgd.torch.data.batch_sampler import GlobalBatchRule
from raysgd.torch.data.batches import TensorCollate, as_batch
from raysgd.torch.data.sampling import ShardedLoader, UndividedLoader, seed_of
from raysgd.torch.data.sources import (
    DividedLoaderSource,
    LoaderSource,
    PlainSource,
    TorchCursor,
)
from raysgd.torch.parallel.ranks import RankSums
from raysgd.torch.parallel.strategy import Strategy
from raysgd.trainer.messages.epochs import EpochRequest
from raysgd.trainer.messages.prediction import AsBatch
from raysgd.trainer.worker.feed import DataFeed, has_divided_source

logger = logging.getLogger(__name__)


class TorchFeed(DataFeed):
    """Opens cursors over the loaders that the operator registered, or over data that the user passes.

    The user may pass data for one call to `train` or `validate` as the call's argument `dataset`.

    Args:
        data_of: Function that gets "train" or "validation" and returns the data that the operator registered under this
            name, or None.
        parallel: Strategy, such as DDP, that keeps the workers' models in sync.
        world_size: Number of workers.
        rank: Rank of this worker.
        rule: Rule for splitting global batches among the workers; None if each batch of a loader is for one worker.
        make_batch: Function that creates batches from arrays that the user passes.
    """

    def __init__(
        self,
        data_of: Callable[[str], ShardedLoader | UndividedLoader | StreamData | None],
        parallel: Strategy,
        world_size: int,
        rank: int = 0,
        rule: GlobalBatchRule | None = None,
        make_batch: AsBatch = as_batch,
    ) -> None:
        super().__init__()
        self._data_of = data_of
        self._parallel = parallel
        self.rule = rule
        self._make_batch = make_batch
        self._group = RankSums(parallel, rank, world_size)

    @property
    def _ranks(self) -> RankSums:
        return self._group

    @property
    def _registered_stream(self) -> StreamData | None:
        data = self._data_of("train")
        return data if isinstance(data, StreamData) else None

    def _cursor_over(self, source: LoaderSource, begin_pass: Callable[[], int]) -> TorchCursor:
        return TorchCursor(source, begin_pass)

    def _source_of_call(self, name: str, request: EpochRequest, *, training: bool) -> LoaderSource:
        loader, ranks = self.made_of_call(name, request), self._ranks
        if isinstance(loader, Stream):
            assert self.rule is not None, "checked in the driver"
            made = stream_data(loader, name, self.rule.of_streams, ranks.world_size)
            return self._stream_source(made, request.seed)
        data = loader
        if self.data_of_call[name].goes_to_all:
            data = call_data.divided(loader, ranks.rank, ranks.world_size, training, self.rule)
        if isinstance(data, ShardedLoader):
            return DividedLoaderSource(data, seed_of(loader, request.seed))
        return self._plain_source(data, training)

    def _make(self, name: str) -> Any:
        return call_data.batches_of(self.data_of_call[name], self.collate_fn(name), self._make_batch)

    def collate_fn(self, name: str) -> Any:
        """Return the `collate_fn` of the loader registered under `name`, or else of the other registered loader.

        Return None if neither loader creates batches from samples.

        Args:
            name: "train" or "validation".
        """
        other = "train" if name == "validation" else "validation"
        return call_data.collate_fn_of(getattr(self._data_of(each), "loader", None) for each in (name, other))

    def ray_loader(self, name: str) -> RayLoader | None:
        loader = getattr(self._data_of(name), "loader", None)
        return loader if isinstance(loader, RayLoader) else None

    def _open_validation(self, request: EpochRequest) -> TorchCursor:
        is_of_call = request.shard_key is not None
        find = self._source_of_call if is_of_call else self._source
        source = find("validation", request, training=False)
        is_dealt = is_of_call or self.ray_loader("validation") is not None
        return TorchCursor(source, lambda: 0, has_one_pass=is_dealt and isinstance(source, PlainSource))

    def _source(self, name: str, request: EpochRequest, *, training: bool) -> LoaderSource:
        data = self._data_of(name)
        if data is None:
            return PlainSource(RepeatedBatches(partial(_refuse_missing, name)))
        if isinstance(data, ShardedLoader):
            return DividedLoaderSource(data, request.seed)
        if isinstance(data, StreamData):
            return self._stream_source(data, request.seed)
        return self._plain_source(data.loader, training)

    def _stream_source(self, data: StreamData, seed: int) -> StreamSource:
        return StreamSource(data, self._ranks, seed, TensorCollate())

    def _plain_source(self, loader: Any, training: bool) -> PlainSource:
        return PlainSource(loader, is_in_lockstep=training and self._parallel.sync.averages)

    def take_rank(self, rank: int, size: int, batch_size: int | None, instead_of: int | None) -> None:
        """Reshard the registered data after the number of workers has changed.

        Streams over other data, and an unfinished validation, are discarded.

        Args:
            rank: This worker's new rank.
            size: New number of workers.
            batch_size: New `BATCH_SIZE` in this worker's config; None if the config has none.
            instead_of: Previous `BATCH_SIZE` in this worker's config. Loaders with this batch size get `batch_size`
                instead. All other loaders keep their batch size.
        """
        self._group = RankSums(self._parallel, rank, size)
        self._of_call = None, None
        self._left_to_validate = None
        for name in ("train", "validation"):
            data = self._data_of(name)
            if isinstance(data, ShardedLoader):
                data.sampler.rule = self.rule
                data.sampler.reshape(rank, size, batch_size if data.sampler.batch_size == instead_of else None)

    def limit_batches(self, size: int) -> None:
        super().limit_batches(size)
        assert self.rule is not None, "`micro_batch_size` needs global batches"
        self.rule = replace(self.rule, cap=size)
        self.break_off()
        self.take_rank(self._group.rank, self._group.world_size, None, None)

    def is_divided(self, cursor: Any) -> bool:
        if cursor is not None and cursor is self._of_call[1]:
            return self.obstacle_of_call(cursor) is None
        return super().is_divided(cursor)

    def obstacle_of_call(self, cursor: Any) -> str | None:
        if cursor is not self._of_call[1] or cursor is None:
            return None
        if not has_divided_source(cursor):
            return "the data of this call are not sharded by the library"
        source = cursor.source
        if isinstance(source, DividedLoaderSource) and not source.is_repeatable:
            name = source.order.name
            return f"the order of the data of this call comes from {name}, which draws a new order each time"
        return None

    def obstacle(self, name: str) -> str | None:
        data = self._data_of(name)
        if isinstance(data, UndividedLoader):
            return f"the {name} loader is not sharded by the library ({data.reason})"
        return None

    def samples_used(self) -> SamplesUsed | None:
        cursor = self.train_cursor
        if not has_divided_source(cursor):
            return None
        due, used, in_flight = cursor.samples_used()
        source = cursor.source
        return SamplesUsed(cursor.pass_index, due, used, in_flight, left_out=source.left_out)


def _refuse_missing(name: str) -> Iterator[Any]:
    """Raise `NoDataError`. Called when a call iterates over a loader that the operator did not register.

    Args:
        name: "train" or "validation".
    """
    way_out = ", or pass `dataset` to `train`." if name == "train" else " before you call `validate`."
    raise NoDataError(f"`{name}_loader` was not registered: pass it to `register_data` in `setup`{way_out}")
